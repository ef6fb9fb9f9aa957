"""Live page of `posttrain ui`, read from a run's files and from MLflow's store.

    tail            reads each JSON line of a growing file once
    series          one metric in bounded memory: moving averages, points for drawing
    runs            runs of an output folder, their stages and liveness
    reader          incremental reader of an output folder and of MLflow's sqlite store
    episodes        latest trajectories, rewards and tool use
    charts          a run as tables and charts: plain dictionaries
    views           content of the tabs (with overview_views, agent_views and service_views)
    export          a run as CSV and JSON
    page_responses  JSON responses to the page's requests
    document        the HTML document, from page.html, page.css and page.js
    page, server    the Gradio controls and the server, on loopback

Nothing here writes to an output folder, takes a lock in it, or imports torch or MLflow; only `page` and `server` import
Gradio.
"""
