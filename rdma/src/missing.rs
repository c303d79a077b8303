//! Why RDMA is not available on this machine, and what to do about it.

use std::{fs, io, path::Path};

use crate::Error;

/// The error for a machine whose library and kernel support RDMA, but which has no device.
pub fn no_device() -> Error {
    Error::NoRdma {
        what: "this machine has no RDMA device".into(),
        cure: "install a card and load its driver; or try it in software: \
               `modprobe rdma_rxe && rdma link add rxe0 type rxe netdev eth0`"
            .into(),
    }
}

/// Finds out why the connection manager does not work. The checks are in the order in which an administrator would make
/// them.
pub(crate) fn diagnose(error: &io::Error) -> Error {
    let folder = Path::new("/dev/infiniband");
    let (what, cure) = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => (
            "no permission to open /dev/infiniband/*".to_owned(),
            "give this user access to these devices (a udev rule, the group `rdma`, or a device plug-in for a container)",
        ),
        _ if !Path::new("/sys/class/infiniband").exists() => (
            "this kernel does not support RDMA (no /sys/class/infiniband)".to_owned(),
            "load the driver of the card, or `modprobe rdma_rxe` for RDMA in software; \
             a kernel without CONFIG_INFINIBAND does not support it",
        ),
        _ if !folder.join("rdma_cm").exists() => (
            "/dev/infiniband/rdma_cm does not exist".to_owned(),
            "`modprobe rdma_ucm`; in a container, pass this device through",
        ),
        _ if fs::read_dir("/sys/class/infiniband").into_iter().flatten().count() == 0 => return no_device(),
        _ => (format!("the connection manager failed: {error}"), "check `rdma link` and the kernel's log"),
    };
    Error::NoRdma { what, cure: cure.into() }
}
