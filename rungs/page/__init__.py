"""One HTML page to look at runs and compare them: `uv run charts.py RUN… --page compare.html`.

    step_table     the metrics of a run, read again as it grows
    shown_run      all that the page shows of a run, ready for JSON; which of many steps, so that no
                   spike disappears
    document       the page as one file: data, our scripts and styles, and uPlot
    server         `--watch`: the page on 127.0.0.1, with new steps as runs train
    assets/        HTML, CSS and JavaScript; uPlot is a library of others, with its licence

In `assets/`, the scripts share one scope and run in the order of `document.SCRIPTS`:

    theme.js     colours of runs, dark and light
    tables.js    the steps of a run as arrays, decoded
    curves.js    the points of a metric against steps, tokens, FLOPs or time; smoothing
    chart.js     a chart: axes, lines, zoom, cursor
    charts.js    which charts there are, linked with each other
    readout.js   the values of all runs under the cursor
    run_list.js  switches the runs on and off
    results.js   the table of keys and figures
    lineage.js   the tree of copies
    events.js    resumes, spikes, skipped steps and the best one
    samples.js   what the model said, by checkpoint
    watch.js     asks the server for new steps
    main.js      puts them together

The page loads nothing: its content security policy allows its own script and style, by hash, and
with `--watch` requests to its server.

Imports `common`, `config`, `planning` and `run`."""
