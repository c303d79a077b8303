//! Accepts RDMA links.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use remora_rdma::duplex::{Listener as ConnectionListener, Request};

use super::device::RdmaContext;
use super::link::RdmaLink;
use super::message::Hello;
use crate::stack::{Address, Link, Listener};

/// A listener of the connection manager.
pub struct RdmaListener {
    door: ConnectionListener,
    context: Arc<RdmaContext>,
}

impl RdmaListener {
    pub(in crate::stack) fn bind(context: &Arc<RdmaContext>, address: SocketAddr) -> io::Result<RdmaListener> {
        Ok(RdmaListener { door: ConnectionListener::listen(&context.stations, address)?, context: context.clone() })
    }
}

impl Listener for RdmaListener {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.door.as_fd()
    }

    fn accept(&mut self) -> io::Result<Box<dyn Link>> {
        while let Some(request) = self.door.next_call()? {
            match Hello::decode(request.hello()) {
                Ok(hello) => return take(&self.context, request, hello),
                Err(violation) => {
                    tracing::debug!(%violation, "an RDMA connection of another protocol");
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

fn take(context: &Arc<RdmaContext>, request: Request, hello: Hello) -> io::Result<Box<dyn Link>> {
    Ok(Box::new(RdmaLink::accept(context, request, hello)?))
}
