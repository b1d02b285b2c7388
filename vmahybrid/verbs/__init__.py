"""Verbs raw packet QPs from Python: what there is, what it can do, a QP of one's own, and its flow rules.

The data path of programs is C (vmahybrid/shim); here is what the service, ``vmahybrid doctor`` and tests need, on
Debian's python3-pyverbs, which is optional: without it these functions raise NotPossibleHere with the package's name.

- :mod:`discovery`: which RDMA device belongs to which interface (sysfs; software devices by name).
- :mod:`library`: pyverbs, the libibverbs behind it, and where the software verbs device is.
- :mod:`caps`: what a device can do, raw packet QPs above all.
- :mod:`qp`: :class:`~vmahybrid.verbs.qp.RawQp`, a raw packet QP with memory and queues: send and receive frames.
- :mod:`rules`: flow rules of a QP as a target of :func:`vmahybrid.steering.mirror.mirror`.
- :mod:`selftest`: each step on one interface, for ``vmahybrid doctor --verbs-selftest IF``.

Run under ``vmahybrid softverbs -- COMMAND`` every Ethernet interface has a device ``sv_IFNAME``.
"""
