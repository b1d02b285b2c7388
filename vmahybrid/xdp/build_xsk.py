"""Builds vmahybrid._xsk: libxdp's AF_XDP calls, the kernel's AF_XDP socket options, and ring access for RingView.

``python build_xsk.py OUT.c`` writes the C source of the extension module; meson compiles it and links libxdp.
"""

import sys
from pathlib import Path

import cffi

ffibuilder = cffi.FFI()
ffibuilder.cdef("""
    #define XDP_COPY ...
    #define XDP_ZEROCOPY ...
    #define XDP_USE_NEED_WAKEUP ...
    #define XDP_STATISTICS ...
    #define XDP_OPTIONS ...
    #define XDP_OPTIONS_ZEROCOPY ...
    #define XSK_LIBXDP_FLAGS__INHIBIT_PROG_LOAD ...
    #define SOL_XDP ...

    struct xsk_umem;
    struct xsk_socket;
    struct xsk_ring_prod { uint32_t size; ...; };
    struct xsk_ring_cons { uint32_t size; ...; };
    struct xsk_umem_config {
        uint32_t fill_size; uint32_t comp_size; uint32_t frame_size; uint32_t frame_headroom; uint32_t flags; ...;
    };
    struct xsk_socket_config {
        uint32_t rx_size; uint32_t tx_size; uint32_t libxdp_flags; uint32_t xdp_flags; uint16_t bind_flags; ...;
    };
    struct xdp_statistics {
        uint64_t rx_dropped; uint64_t rx_invalid_descs; uint64_t tx_invalid_descs; uint64_t rx_ring_full;
        uint64_t rx_fill_ring_empty_descs; uint64_t tx_ring_empty_descs; ...;
    };
    struct xdp_options { uint32_t flags; };
    struct xdp_desc { uint64_t addr; uint32_t len; uint32_t options; };

    int xsk_umem__create(struct xsk_umem **umem, void *umem_area, uint64_t size, struct xsk_ring_prod *fill,
                         struct xsk_ring_cons *comp, const struct xsk_umem_config *config);
    int xsk_umem__delete(struct xsk_umem *umem);
    int xsk_socket__create_shared(struct xsk_socket **xsk, const char *ifname, uint32_t queue_id,
                                  struct xsk_umem *umem, struct xsk_ring_cons *rx, struct xsk_ring_prod *tx,
                                  struct xsk_ring_prod *fill, struct xsk_ring_cons *comp,
                                  const struct xsk_socket_config *config);
    int xsk_socket__fd(const struct xsk_socket *xsk);
    void xsk_socket__delete(struct xsk_socket *xsk);

    #define XDP_RX_RING ...
    #define XDP_TX_RING ...
    #define XDP_UMEM_FILL_RING ...
    #define XDP_UMEM_COMPLETION_RING ...
    void vmh_umem_populate(int fd, uint64_t bytes, int huge);
    int vmh_umem_register(int fd, void *area, uint64_t bytes, uint32_t chunk_size);
    int vmh_xsk_bind(int fd, uint32_t ifindex, uint32_t queue, uint16_t flags, int umem_fd);
    int vmh_xsk_map(int fd, uint32_t size);

    struct vmh_view { int fd; ...; };
    int vmh_view_open(struct vmh_view *v, int fd, uint32_t rx, uint32_t tx, uint32_t fill, uint32_t comp);
    void vmh_view_close(struct vmh_view *v);
    uint32_t vmh_view_fill(struct vmh_view *v, const uint64_t *addrs, uint32_t n);
    uint32_t vmh_view_receive(struct vmh_view *v, struct xdp_desc *out, uint32_t n);
    uint32_t vmh_view_send(struct vmh_view *v, const struct xdp_desc *descs, uint32_t n);
    uint32_t vmh_view_completed(struct vmh_view *v, uint64_t *addrs, uint32_t n);
    int vmh_view_kick(struct vmh_view *v);
""")
ffibuilder.set_source(
    "vmahybrid._xsk",
    Path(__file__).with_name("xsk_view.c").read_text(),
    libraries=["xdp", "bpf"],
)

if __name__ == "__main__":
    ffibuilder.emit_c_code(sys.argv[1])
