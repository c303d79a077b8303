//! Why there is no RDMA on this machine, and what to do about it.

use std::{fs, io, path::Path};

use crate::Error;

/// There is a library, and a kernel that knows of RDMA, and no device.
pub fn no_device() -> Error {
    Error::NoRdma {
        what: "this machine has no RDMA device".into(),
        cure: "put in a card and load its driver; or try it out in software: \
               `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`"
            .into(),
    }
}

/// What keeps the connection manager from working, in the order in which one would find out.
pub(crate) fn diagnose(error: &io::Error) -> Error {
    let folder = Path::new("/dev/infiniband");
    let (what, cure) = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => (
            "no permission to open /dev/infiniband/*".to_owned(),
            "give this user access to these devices (a udev rule, the group `rdma`, or a device plug-in for a container)",
        ),
        _ if !Path::new("/sys/class/infiniband").exists() => (
            "this kernel has no RDMA (no /sys/class/infiniband)".to_owned(),
            "load the driver of the card, or `modprobe rdma_rxe` for RDMA in software; \
             a kernel without CONFIG_INFINIBAND has none",
        ),
        _ if !folder.join("rdma_cm").exists() => (
            "there is no /dev/infiniband/rdma_cm".to_owned(),
            "`modprobe rdma_ucm`; in a container, pass this device in",
        ),
        _ if fs::read_dir("/sys/class/infiniband").into_iter().flatten().count() == 0 => return no_device(),
        _ => (format!("the connection manager says: {error}"), "see what `rdma link` and the kernel's log say"),
    };
    Error::NoRdma { what, cure: cure.into() }
}
