"""`posttrain prefer`: people compare or score answers on a page of this machine.

Models answer (`sampled_answers`), a reward model's states say which pair to ask (`answer_states`), `rating_room` keeps
what is said, `rating_routes` serves the page (`rating_page`, `rating_script`, `rating_style`).
"""
