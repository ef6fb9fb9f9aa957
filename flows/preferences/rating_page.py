"""The page itself: structure without data, filled by `rating_script`."""

from __future__ import annotations

__all__ = ["PAGE"]

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>posttrain prefer</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="rating.css">
<script src="rating.js" defer></script>
</head>
<body>
<header>
  <strong>posttrain prefer</strong>
  <span id="progress" role="status"></span>
  <span class="gap"></span>
  <button id="show-agreement" type="button" aria-expanded="false" aria-controls="agreement">agreement</button>
  <button id="change" type="button" hidden></button>
</header>
<p id="problem" role="alert" hidden></p>
<form id="who" hidden>
  <label for="name">Your name</label>
  <input id="name" maxlength="40" autocomplete="nickname" required>
  <button type="submit" class="main">begin</button>
</form>
<section id="agreement" aria-label="agreement of the raters" hidden></section>
<main id="task" hidden>
  <h1 id="question" tabindex="-1"></h1>
  <details id="prompt-box" open><summary>Prompt</summary><div id="prompt"></div></details>
  <div id="answers"></div>
</main>
<p id="done" hidden>Nothing is left to rate. Thank you.</p>
<footer id="controls" hidden>
  <div id="reasons" role="radiogroup" aria-label="reason, if you like"></div>
  <label class="comment"><span>comment <kbd>c</kbd></span>
    <textarea id="comment" rows="1" maxlength="2000"
      title="optional; Esc goes back to the keys"></textarea>
  </label>
  <div id="choices"></div>
</footer>
</body>
</html>
"""
