"""The live page of `posttrain monitor`: what a run does, read from the files that it leaves and from MLflow.

    tail          JSON lines of a growing file, each read once
    series        one metric in bounded memory: moving averages, points for drawing
    runs          which runs an output folder holds, their stages, and whether their process lives
    store         runs of MLflow's sqlite store whose files are gone, read without a lock
    reader        all of that behind one object, refreshed while the page is open
    episodes      the newest trajectories, the newest rewards, what tools were used
    charts        a run as tables and charts: plain dictionaries
    views         which of them stand on which tab (with agent_views and machine_views)
    export        a run as CSV and JSON
    script, style what the browser draws with
    page, server  the Gradio page, on loopback

Nothing here writes to an output folder, takes a lock in it, or imports torch or MLflow; only `page` and `server` import
Gradio.
"""
