//! The snapshot as the server gives it to its replicas, over one connection or two.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use remora_redis::psync::client::{self, Channel};
use remora_table::JournalWriter;

use super::plan::{Fault, Plan, Stops};
use super::psync_link::{Announced, Opening, PsyncLink, is_same_history, out_of_place};
use super::snapshot::{begin, fill};
use super::socket::Wire;
use super::stream::follow;

/// Where the stream is when a snapshot is whole.
pub(super) enum Stream {
    /// Another capture follows it.
    Elsewhere,
    /// It comes next, over this connection.
    Next(Wire, Box<JournalWriter>),
    /// It has flowed from the beginning, and goes on.
    Flows(JoinHandle<()>),
}

/// The snapshot to its last byte, as the server gives it to replicas.
pub(super) fn take_snapshot(plan: &Plan) -> Result<Stream, Fault> {
    match open(plan)? {
        Opened::One(asked) => take_first(plan, asked),
        Opened::Two { snapshot, stream } => take_both(plan, snapshot, stream),
    }
}

/// The snapshot, whose connection then goes on as the stream.
pub(super) fn take_first(plan: &Plan, asked: Announced) -> Result<Stream, Fault> {
    let (taking, journal) = begin(plan, &asked)?;
    let wire = fill(taking, asked)?;
    Ok(journal.map_or(Stream::Elsewhere, |journal| Stream::Next(wire, Box::new(journal))))
}

/// The snapshot, and the stream beside it on a thread of its own. A stream without its snapshot is of no use to anyone, and has
/// ended when this fails.
fn take_both(plan: &Plan, asked: Announced, stream: Wire) -> Result<Stream, Fault> {
    let (taking, journal) = begin(plan, &asked)?;
    let Some(mut journal) = journal else { return Ok(Stream::Elsewhere) };
    let abandoned = Arc::new(AtomicBool::new(false));
    let (own, gives_up) = (plan.clone(), abandoned.clone());
    let following = std::thread::Builder::new().name("stream".into()).spawn(move || {
        let stop = Stops { plan: &own.stop, abandoned: Some(&gives_up) };
        follow(&own, stream, &mut journal, stop);
    });
    let no_thread = |cause| Fault::Link { during: "stream", cause: format!("no thread for it: {cause}") };
    let following = following.map_err(no_thread)?;
    let taken = fill(taking, asked);
    if taken.is_err() {
        abandoned.store(true, Ordering::Relaxed);
        let _ = following.join();
        return taken.map(|_| Stream::Elsewhere);
    }
    Ok(Stream::Flows(following))
}

/// How the server serves us.
enum Opened {
    /// Snapshot and stream one after the other.
    One(Announced),
    /// Both at once.
    Two { snapshot: Announced, stream: Wire },
}

/// Asks for a snapshot.
fn open(plan: &Plan) -> Result<Opened, Fault> {
    if plan.journal.is_none() {
        return Ok(Opened::One(announced(plan)?));
    }
    let mut link = PsyncLink::connect(plan, options(plan, Channel::WholeOrStream))?;
    match link.opening(Stops::of(plan))? {
        Opening::Full { replid, offset, payload } => Ok(Opened::One(link.announced(replid, offset, payload))),
        Opening::TwoChannels => match open_second(plan, link) {
            // The user may lack the rule for SYNC, which only the second channel needs.
            Err(Fault::Psync(error)) if !error.is_temporary() => {
                tracing::info!(%error, "the server's second channel is not open to us; taking all over one");
                Ok(Opened::One(announced(plan)?))
            }
            opened => opened,
        },
        Opening::Continue { .. } | Opening::Channel { .. } => Err(out_of_place("to continue")),
    }
}

/// Takes the snapshot over a second connection, and the first one for the stream from the byte after it.
fn open_second(plan: &Plan, stream: PsyncLink) -> Result<Opened, Fault> {
    let mut link = PsyncLink::connect(plan, options(plan, Channel::Snapshot))?;
    let (snapshot, client) = match link.opening(Stops::of(plan))? {
        Opening::Channel { replid, offset, payload, client } => (link.announced(replid, offset, payload), client),
        _ => return Err(out_of_place("something else than a channel")),
    };
    let (replid, offset) = (snapshot.replid, snapshot.offset);
    let channel = Channel::Stream { snapshot_client: client };
    let resume = Some((replid, offset + 1));
    let mut stream = stream.again(client::Options { resume, channel, ..Default::default() });
    match stream.opening(Stops::of(plan))? {
        Opening::Continue { replid: now } => {
            is_same_history(replid, now, offset)?;
            Ok(Opened::Two { snapshot, stream: stream.into_stream() })
        }
        _ => Err(out_of_place("another snapshot")),
    }
}

/// The whole over one connection.
fn announced(plan: &Plan) -> Result<Announced, Fault> {
    let mut link = PsyncLink::for_snapshot(plan, options(plan, Channel::Whole))?;
    match link.opening(Stops::of(plan))? {
        Opening::Full { replid, offset, payload } => Ok(link.announced(replid, offset, payload)),
        _ => Err(out_of_place("to continue")),
    }
}

fn options(plan: &Plan, channel: Channel) -> client::Options {
    client::Options { rdb_version: plan.reader_version.clone(), channel, ..Default::default() }
}
