"""Human preferences: items to rate, the journal of ratings, agreement, question order, and training rows."""
