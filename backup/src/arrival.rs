//! Arrival: reads the slots of a source's snapshot into a [`Keeper`], on a thread of its own.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use remora_fabric::Peer;
use remora_table::{Origin, Slot, SnapshotCopy, SnapshotReader};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use remora_process::exit::Failure;
use remora_reader::meter::Meter;
use remora_reader::parts::{FeedError, Mapped, Part};
use remora_reader::relay::reader::{Lost, ReadFrom, RelayReader};
use remora_reader::spool::{Held, SnapshotId};

/// How long the thread sleeps at most when nothing has arrived: it adds to the time until a new slot is seen, and to
/// the time that stopping takes.
const PACE: Duration = Duration::from_millis(1);

/// Why slots stopped arriving before the last one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArrivalError {
    /// The source's table cannot be read any more.
    #[error(transparent)]
    Feed(#[from] FeedError),
    /// The bytes cannot be kept.
    #[error("{0}")]
    Disk(io::Error),
}

impl From<remora_table::Error> for ArrivalError {
    fn from(error: remora_table::Error) -> ArrivalError {
        ArrivalError::Feed(error.into())
    }
}

/// What the thread reports.
pub(crate) enum ArrivalNews {
    /// The replica that slots came from cannot be read any more.
    Lost(Lost),
    /// The last slot has arrived, or none arrives any more.
    Ended(Result<(), ArrivalError>),
}

/// Slots that arrive. Dropping it stops the thread, within a slot's time.
pub(crate) struct Arrival {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    orders: Sender<ReadFrom>,
    news: UnboundedReceiver<ArrivalNews>,
    has_copy: bool,
}

impl Arrival {
    /// Begins to read, behind what has arrived already. The meter shows how far a copy is.
    pub(crate) fn begin(part: Part, kept: Arc<dyn Keeper>, meter: Arc<Meter>) -> io::Result<Arrival> {
        let stop = Arc::new(AtomicBool::new(false));
        let (tell, news) = unbounded_channel();
        let (orders, ordered) = channel();
        let (stopped, has_copy) = (Arc::clone(&stop), part.copy.is_some());
        let thread = std::thread::Builder::new().name("snapshot".into()).spawn(move || {
            let exchange = Exchange { orders: ordered, tell, meter };
            let result =
                if has_copy { relay(part, &*kept, &stopped, &exchange) } else { arrive(part, &*kept, &stopped) };
            _ = exchange.tell.send(ArrivalNews::Ended(result)); // the owner may have gone
        })?;
        Ok(Arrival { stop, thread: Some(thread), orders, news, has_copy })
    }

    /// Reads from there from now on, if slots go into a copy.
    pub(crate) fn read_from(&self, from: ReadFrom) {
        _ = self.orders.send(from); // a thread that has ended reads nothing more
    }

    /// Whether slots go into a copy that replicas can read.
    pub(crate) fn has_copy(&self) -> bool {
        self.has_copy
    }

    /// The next report. Cancel-safe.
    pub(crate) async fn news(&mut self) -> ArrivalNews {
        match self.news.recv().await {
            Some(news) => news,
            None => {
                let error =
                    io::Error::other("the thread ended unexpectedly; this is a bug of remora, please report it");
                ArrivalNews::Ended(Err(ArrivalError::Disk(error)))
            }
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            _ = thread.join(); // what it had to say was said by its result
        }
    }
}

/// What the thread hears and says about other replicas.
struct Exchange {
    orders: Receiver<ReadFrom>,
    tell: UnboundedSender<ArrivalNews>,
    meter: Arc<Meter>,
}

fn arrive(part: Part, kept: &dyn Keeper, stop: &AtomicBool) -> Result<(), ArrivalError> {
    let first = kept.reached().slots;
    let mut peer = part.peer;
    let view = peer.view();
    let mut mapped = Mapped::new(if part.in_place { None } else { view.clone() });
    let view = view.filter(|_| part.in_place);
    let mut reader = SnapshotReader::new(view, part.sink, part.layout, part.expect, move |number| number < first)?;
    while !stop.load(Ordering::Relaxed) {
        if turn(&mut reader, &mut *peer, kept, &mut mapped)? {
            continue;
        }
        if reader.is_complete() {
            return kept.complete().map_err(ArrivalError::Disk);
        }
        peer.wait(PACE).map_err(remora_table::Error::from)?;
    }
    Ok(())
}

/// Reads into a copy, from the source or from a replica, and from there into the keeper.
fn relay(part: Part, kept: &dyn Keeper, stop: &AtomicBool, exchange: &Exchange) -> Result<(), ArrivalError> {
    let Part { peer, sink, expect, copy: Some(plan), .. } = part else { return Ok(()) };
    let copy = SnapshotCopy::create(sink, plan.own, expect, kept.reached().slots)?;
    let mut reader = RelayReader::new(Instant::now(), copy, peer, plan);
    while !stop.load(Ordering::Relaxed) {
        let now = Instant::now();
        exchange.orders.try_iter().for_each(|from| reader.read_from(now, from));
        let before = reader.progress();
        if let Some(lost) = reader.pump(now)? {
            _ = exchange.tell.send(ArrivalNews::Lost(lost)); // the owner may have gone
        }
        let mut moved = reader.progress() != before;
        while let Some(slot) = reader.next_slot() {
            let held = kept.keep(&slot).map_err(ArrivalError::Disk)?;
            reader.release(slot);
            kept.add(held).map_err(ArrivalError::Disk)?;
            moved = true;
        }
        exchange.meter.slots_below.set(kept.reached().slots);
        reader.show(&exchange.meter);
        if moved {
            continue;
        }
        if reader.is_whole() && kept.reached().slots >= reader.progress().published {
            return kept.complete().map_err(ArrivalError::Disk);
        }
        wait(&mut reader);
    }
    Ok(())
}

/// Sleeps until something has arrived, and at most for [`PACE`].
fn wait(reader: &mut RelayReader) {
    let pace = Timespec { tv_sec: 0, tv_nsec: i64::from(PACE.subsec_nanos()) };
    let mut fds: Vec<PollFd<'_>> = reader.arms().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    _ = poll(&mut fds, Some(&pace)); // an interruption is only an earlier look
}

/// Takes what has arrived. Returns whether there was anything.
fn turn(
    reader: &mut SnapshotReader,
    peer: &mut dyn Peer,
    kept: &dyn Keeper,
    mapped: &mut Mapped,
) -> Result<bool, ArrivalError> {
    reader.pump(peer)?;
    let mut moved = false;
    while let Some(slot) = reader.next_slot() {
        let held = kept.keep(&slot).map_err(ArrivalError::Disk)?;
        // Only now is it known that its memory was not used for another slot meanwhile.
        reader.release(slot)?;
        mapped.copied(held.length.into());
        kept.add(held).map_err(ArrivalError::Disk)?;
        moved = true;
    }
    Ok(moved)
}

// Target: where a snapshot goes as it arrives. One keeps each snapshot as a file that is mounted, another one keeps
// the slots of a file that is put in its place at the end.

/// Where snapshots go, one after the other.
pub(crate) trait Target: Send + Sync {
    /// The one that has come last.
    fn present(&self) -> Option<Arc<dyn Keeper>>;

    /// Another one comes: what has not arrived of the one before will not.
    ///
    /// # Errors
    /// There is no place for it.
    fn put(&self, snapshot: SnapshotId) -> io::Result<Arc<dyn Keeper>>;

    /// The folder into whose file system its bytes go.
    fn folder(&self) -> &Path;

    /// Why bytes cannot be kept, and what to do.
    fn failure(&self, error: &io::Error) -> Failure;
}

/// Where the slots of one snapshot go, in their order.
pub(crate) trait Keeper: Send + Sync {
    /// Which snapshot it is.
    fn origin(&self) -> Origin;

    /// How far it is.
    fn reached(&self) -> Reached;

    /// Writes the bytes of the next slot, which count once they are [`Keeper::add`]ed.
    ///
    /// # Errors
    /// They cannot be written.
    fn keep(&self, slot: &Slot) -> io::Result<Held>;

    /// The slot was right: its memory had not been used for another one when it had been written.
    ///
    /// # Errors
    /// It cannot be recorded.
    fn add(&self, held: Held) -> io::Result<()>;

    /// Everything has arrived.
    ///
    /// # Errors
    /// It cannot be made safe, or is not what it should be.
    fn complete(&self) -> io::Result<()>;

    /// What has not arrived will not come.
    fn lose(&self);
}

/// Whether more will come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    #[default]
    Arriving,
    Whole,
    /// The source has withdrawn it before all had arrived.
    Lost,
}

/// How far a snapshot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) bytes: u64,
    pub(crate) slots: u64,
    pub(crate) stage: Stage,
}
