//! Where RDMA links are called.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use remora_rdma::duplex::{Listener as Door, Request};

use super::letter::Hello;
use super::link::RdmaLink;
use super::site::Sites;
use crate::stack::{Address, Link, Listener};

/// A listener of the connection manager.
pub struct RdmaListener {
    door: Door,
    sites: Arc<Sites>,
}

impl RdmaListener {
    pub(in crate::stack) fn bind(sites: &Arc<Sites>, address: SocketAddr) -> io::Result<RdmaListener> {
        Ok(RdmaListener { door: Door::listen(&sites.stations, address)?, sites: sites.clone() })
    }
}

impl Listener for RdmaListener {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.door.as_fd()
    }

    fn accept(&mut self) -> io::Result<Box<dyn Link>> {
        while let Some(request) = self.door.next_call()? {
            match Hello::decode(request.hello()) {
                Ok(hello) => return take(&self.sites, request, hello),
                Err(wrong) => {
                    tracing::debug!(%wrong, "an RDMA call that is none of ours");
                    request.refuse(b"");
                }
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    fn address(&self) -> Address {
        Address::Rdma(self.door.address())
    }
}

fn take(sites: &Arc<Sites>, request: Request, hello: Hello) -> io::Result<Box<dyn Link>> {
    Ok(Box::new(RdmaLink::accept(sites, request, hello)?))
}
