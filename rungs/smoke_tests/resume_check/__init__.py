"""Resume check: compare training that is killed and resumed with uninterrupted training.

check   a short copy of a run, trained both ways; compare the results and print the tables
kill    start training processes and kill them at random moments"""
