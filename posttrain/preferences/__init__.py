"""Rating page of `posttrain label`: people compare or score answers in a browser on this machine.

Models answer (`sampled_answers`, which also computes the reward posterior that chooses the pairs to ask about),
`rating_session` records the ratings, `rating_routes` serves the page (rating.html, rating.js, rating.css).
"""
