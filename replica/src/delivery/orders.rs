//! Orders to the delivery, its notices, and the driver's handle on its thread.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::mpsc::UnboundedSender;

use crate::conversion::Conversion;
use crate::delivery::introduction::{Answer, Introduction};
use crate::link::candidates::{Candidates, Newcomer};
use remora_process::exit::Failure;
use remora_reader::feed::{Feed, Position};
use remora_reader::meter::Meter;
use remora_reader::parts::FeedError;
use remora_reader::relay::reader::{Lost, ReadFrom};
use remora_reader::spool;

/// An order of the driver to the delivery.
pub(crate) enum Order {
    /// Read from this feed from now on.
    Attach(Box<Feed>),
    /// Read the snapshot's slots from this source or peer from now on.
    ReadFrom(ReadFrom),
    /// Close the link of a server whose snapshot will never be whole. A server that loads from its link answers no
    /// command until then.
    GiveUp,
    /// End the link of a server that has loaded, and give it another snapshot when it comes back. Answered by
    /// [`Notice::FeedWanted`].
    LoadAgain,
    /// Take this connection of the server, which was intercepted on its way to the primary, as its link.
    Adopt(Box<Newcomer>),
    /// Send the server no more of the stream until it connects again.
    Hold,
    /// Whether to give memory to the server's module, and to refer to it in the payload. Order this when the link's
    /// port is open, and before the server is pointed at it: the server may ask for its payload at once.
    UseModule(bool),
    /// The result of an introduction.
    Introduced {
        /// The introduction's number.
        number: u64,
        answer: Result<Answer, String>,
    },
    /// End, and remove the spool if the sync is done.
    Stop { done: bool },
}

/// What the delivery reports.
#[derive(Debug)]
pub(crate) enum Notice {
    /// The server has connected and sent `PSYNC`.
    Asked,
    /// The server's module must be given memory. The delivery waits for [`Order::Introduced`].
    Introduce(Introduction),
    /// The whole snapshot has arrived.
    Fetched,
    /// The whole snapshot was written to the server.
    PayloadSent,
    /// The server has loaded the snapshot: it acknowledged an offset.
    Loaded,
    /// The server's link ended.
    LinkLost { text: String, loading: bool },
    /// The feed ended. Another one is needed that begins where [`Position`] says.
    FeedLost { error: FeedError },
    /// An upstream replica cannot be read any more. Nothing is read until [`Order::ReadFrom`] names another.
    PeerLost(Lost),
    /// The server's request needs another feed.
    FeedWanted,
    /// A slot in the source's memory is damaged.
    Damaged { error: FeedError },
    /// The server cannot be given this data set, or what follows in its stream.
    Refused { failure: Failure },
    /// The delivery cannot continue.
    Fatal { text: String },
}

/// The position, as the thread publishes it and the handle reads it.
#[derive(Clone, Default)]
pub(super) struct Shared(Arc<Mutex<Position>>);

impl Shared {
    pub(super) fn publish(&self, progress: Position) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = progress;
    }

    fn read(&self) -> Position {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The thread's end of a [`Handle`].
pub(super) struct Control {
    pub(super) orders: Receiver<Order>,
    /// Readable when an order has arrived.
    pub(super) waker: Arc<OwnedFd>,
    pub(super) shared: Shared,
}

impl Control {
    /// Clears the wake-up before the orders are read.
    pub(super) fn rest(&self) {
        let mut woken = [0; 8];
        let _ = rustix::io::read(&*self.waker, &mut woken);
    }
}

/// Both ends, without a thread.
pub(super) fn ends() -> io::Result<(Handle, Control)> {
    let waker = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let (orders, inbox) = channel();
    let shared = Shared::default();
    let control = Control { orders: inbox, waker: waker.clone(), shared: shared.clone() };
    Ok((Handle { orders, waker, thread: None, shared }, control))
}

/// The driver's handle on the thread. Dropping it ends the thread.
pub(crate) struct Handle {
    orders: Sender<Order>,
    waker: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    shared: Shared,
}

impl Handle {
    /// Starts the thread. It ends at [`Order::Stop`], or when the orders have no sender any more.
    pub(super) fn spawn(run: impl FnOnce(Control) + Send + 'static) -> io::Result<Handle> {
        let (mut handle, control) = ends()?;
        handle.thread = Some(std::thread::Builder::new().name("delivery".into()).spawn(move || run(control))?);
        Ok(handle)
    }

    pub(crate) fn order(&self, order: Order) {
        if self.orders.send(order).is_ok() {
            // If the eventfd cannot be written to, it has been woken already.
            let _ = rustix::io::write(&*self.waker, &1_u64.to_ne_bytes());
        }
    }

    pub(crate) fn progress(&self) -> Position {
        self.shared.read()
    }

    /// Whether the delivery was not stopped.
    pub(crate) fn is_running(&self) -> bool {
        self.thread.is_some()
    }

    /// Ends the thread and waits for its end, which takes one turn of its loop.
    pub(crate) fn stop(&mut self, done: bool) {
        self.order(Order::Stop { done });
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop(false);
    }
}

/// The parts of a delivery.
pub(crate) struct Setup {
    /// The listener for the server's link.
    pub(crate) candidates: Candidates,
    /// The folder of the slots that survive the agent (`--state-dir`).
    pub(crate) spool: Option<PathBuf>,
    /// The slots that were found there.
    pub(crate) found: Option<spool::Spool>,
    /// How the snapshot is converted; `None`: the server gets the primary's own.
    pub(crate) conversion: Option<Conversion>,
    /// Bytes of the stream that may wait here while the server loads.
    pub(crate) backlog_limit: usize,
    pub(crate) meter: Arc<Meter>,
    pub(crate) notices: UnboundedSender<Notice>,
}
