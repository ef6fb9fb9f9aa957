"""Preferences by people: items to rate, the journal of ratings, agreement, the choice of what to ask next, and rows."""
