"""Charts as PNG files, and HTML pages of one file: to look at runs and compare them, `uv run
charts.py RUN… --page compare.html`, and at what a model does with a text, `uv run model.py RUN
--look TEXT`.

    drawing            the style of all charts: colours, axes, writing to disk
    run_charts         draws the charts of one run, also again and again while it trains; a new
                       chart is a function and a line of a table there
    comparison_charts  several runs compared, the power law, the coordinate check of muP, the
                       learning-rate sweep
    run_page           the page of runs; `--watch`: on 127.0.0.1, with new steps as runs train
    page_data          a run's data for the page as JSON; thins steps without losing spikes
    look_page          the page of `--look`
    page_file          a page as one file, with its content security policy
    assets/            HTML, CSS and JavaScript; uPlot is third-party, with its licence

In `assets/`, the scripts of a page share one scope. Those of the page of runs, in the order of
`run_page.SCRIPTS`:

    theme.js     colours of runs, dark and light
    tables.js    the steps of a run as arrays, decoded
    curves.js    the points of a metric against steps, tokens, FLOPs or time; smoothing
    chart.js     a chart: axes, lines, zoom, cursor
    charts.js    the list of charts, linked with each other
    readout.js   the values of all runs under the cursor
    run_list.js  switches runs on and off
    results.js   the table of keys and figures
    lineage.js   the tree of copied runs
    events.js    resumes, spikes, skipped steps and the best one
    samples.js   samples by checkpoint
    heat_map.js  a picture of numbers as colours
    layers.js    what each layer did: over the steps, over depth, head by head, what moved
    watch.js     asks the server for new steps
    main.js      puts everything together

Those of `--look`, after `theme.js`, in the order of `look_page.SCRIPTS`:

    look_data.js           what the model does, decoded; what the reader has chosen
    look_text.js           the tokens, coloured by loss or attention
    look_predictions.js    the likeliest next tokens after each layer
    look_attention.js      the attention maps
    look_contributions.js  what adds to the logit
    look.js                puts everything together

A page loads nothing: its content security policy allows its own script and style, by hash, and
with `--watch` requests to its server."""
