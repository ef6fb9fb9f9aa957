"""Live page of `posttrain monitor`, read from a run's files and from MLflow.

    tail          JSON lines of a growing file, each read once
    series        one metric in bounded memory: moving averages, points for drawing
    runs          runs of an output folder, their stages and liveness
    store         runs of MLflow's sqlite store whose files are gone, read without a lock
    reader        all of the above in one object, refreshed while the page is open
    episodes      latest trajectories, rewards and tool use
    charts        a run as tables and charts: plain dictionaries
    views         content of the tabs (with agent_views and machine_views)
    export        a run as CSV and JSON
    script, style JavaScript and CSS
    page, server  the Gradio page, on loopback

Nothing here writes to an output folder, takes a lock in it, or imports torch or MLflow; only `page` and `server` import
Gradio.
"""
