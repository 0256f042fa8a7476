"""The fault campaign: a request that meets a fault fails alone, whatever the fault.

    python -m experiments.faults
    python -m experiments.faults cases=300 kinds=drafts,matchers
    python -m experiments.faults only=drafts:17

Every case decodes a victim and its neighbours in one batch, under a strategy and a grammar engine
drawn from the case's seed, and the neighbours once more without the victim. It is right if the
victim is served, or fails with a reason; if all neighbours have the same outputs both times; if no
invariant breaks (``engine.paranoid`` is on); and if no thread is left behind but those that are
stuck inside an engine, which cannot be ended. Cases run in processes of their own, which are killed
if a case outlives ``limit_s``. The kinds of faults, a file each:

- ``drafts``: a draft model that proposes what it must not, logits that are no numbers;
- ``compiles``: compilations that raise, hang, or are slow;
- ``matchers``: matchers that raise or lie, once or from then on;
- ``schemas``: schemas made up from the seed that engines have reason to dislike, over the real
  vocabulary;
- ``bench``: every schema of JSONSchemaBench under both engines, over the real vocabulary;
- ``kills``: the main job killed at a random moment, then resumed.

Prints a table by kind and one line for each violation, with the words that repeat it; writes
``faults.json`` (and the table as Markdown) below ``out``; exits 1 if anything is violated.
Settings (``name=value``): ``cases`` (in all), ``seed`` (of the first case of each kind), ``kinds``,
``only``, ``limit_s``, ``processes``, ``out``.
"""
