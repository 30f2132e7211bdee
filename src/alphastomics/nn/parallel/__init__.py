r"""Sequence parallelism: a context is split over several processes, each with some of its cells and the whole network.

.. math::

    x = [x_0; x_1; \dots; x_{W-1}], \qquad x_r \in \mathbb{R}^{n}, \quad n = \lceil N / W \rceil

Operations on single cells need no communication. Operations on several cells are:

- attention: :func:`split_attention`, exact, by one of two exchanges;
- sums over cells, such as losses and counts: :meth:`SequenceParallel.sum_over_cells`;
- anything on tensors small enough for every process, such as positions: :meth:`SequenceParallel.gather`.

**Gradients.** Let :math:`\ell` be the loss of the whole context, the same number on all processes: its numerator and
its denominator are each results of ``sum_over_cells``, or it is computed from the result of ``gather``. Process s calls
``backward()`` on its copy :math:`\ell_s`, and every collective passes derivatives from all processes to all, so that process r
obtains the derivative of *all* copies with respect to its copy of the weights,

.. math::

    g_r = \sum_s \frac{\partial \ell_s}{\partial \theta_r}, \qquad
    \frac1W \sum_r g_r = \frac{\partial}{\partial\theta}\, \frac1W \sum_s \ell_s = \frac{\partial \ell}{\partial \theta}.

Gradients of weights are therefore **averaged** over the processes, as in ``DistributedDataParallel``, without a factor W,
whether a weight acts before ``split``, on the split cells, or after ``gather``. If contexts are also distributed over further
processes, the mean is over all processes.

If the loss of each process is only its part of the whole (the sum over its cells divided by the count of all), gradients must
be summed, or the loss multiplied by W.

All processes of a group must run the same steps on the same contexts; otherwise they wait for each other indefinitely.
"""

from __future__ import annotations

from alphastomics.nn.parallel.attention import attend_to_all, split_attention
from alphastomics.nn.parallel.sequence import SINGLE_PROCESS, SequenceParallel

__all__ = ["SINGLE_PROCESS", "SequenceParallel", "attend_to_all", "split_attention"]
