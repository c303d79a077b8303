//! Reading: by which transport the source's memory can be read, tried before anything is changed.
//!
//! The source exports memory without data (as for `remora probe`), and the agent connects to it as it will connect to
//! the tables: the same choice, the same keys, the same refusals. A conversation of its own does it, so that the source
//! lets go of that memory at once.

use std::sync::Arc;

use remora_fabric::{Memory, Pages, RegionKey, TransportKind};
use remora_protocol::Offer;

use super::source::Source;
use crate::args::{ReadArgs, ReplicaArgs, TransportChoice};
use crate::conversation::Protection;
use crate::conversation::tokens::Credentials;
use crate::exit::{Code, Failure};
use crate::patience::Patience;
use crate::probe::measure;
use crate::tasks::blocking;

/// How the source is read.
pub(crate) struct Reading {
    pub(crate) transport: TransportKind,
    /// Why better transports are not used; empty if this is the best one.
    pub(crate) why: String,
    pub(crate) protection: Protection,
    /// Bytes per second, measured for a moment.
    pub(crate) rate: Option<u64>,
}

/// Tries the transports. `is_sealed`: the source's tables are, for other hosts.
///
/// # Errors
/// The source cannot be read over what `--transport` permits.
async fn try_out(
    args: &ReadArgs,
    credentials: &Credentials,
    is_sealed: bool,
    measures: bool,
) -> Result<Reading, Failure> {
    let mut source = Source::connect(args, credentials).await.map_err(super::source::failure)?;
    let way = source.way(args);
    if let Some(why) = way.why_none(is_sealed) {
        return Err(Failure::refused(format!("the source {} cannot be read as --transport asks: {why}", args.source)));
    }
    let keys = source.probe_keys(args).await?;
    let offered: Vec<_> = keys.iter().filter_map(|bytes| RegionKey::from_bytes(bytes.clone()).ok()).collect();
    let region = offered.iter().map(RegionKey::length).max().unwrap_or(0);
    let is_offered = offered.iter().any(|key| way.permits(key.transport()));
    let reading = blocking(move || {
        let sink = Memory::create("remora-trial", measure::MOMENT_SINK, Pages::Small).map(Arc::new);
        let sink = sink.map_err(|error| Failure::local(format!("no memory to try the transports with: {error}")))?;
        let (mut peer, transport, why) = way.try_out(keys, is_sealed, &sink)?;
        let rate = if measures { measure::in_a_moment(&mut *peer, region) } else { None };
        let protection = way.protection(transport, is_sealed);
        Ok(Reading { transport, why, protection, rate })
    });
    // What the source does not offer, it will not offer in a moment.
    reading.await.map_err(|failure| {
        let passes = is_offered && failure.code == Code::Source;
        failure.that_passes(passes)
    })
}

/// Tries the transports for a run with these options: a dry run tries and measures all, and a sync the one that was
/// asked for, which may not be there. Of several, TCP is always left.
///
/// # Errors
/// As [`try_out`].
pub(super) async fn of_a_run(
    args: &ReplicaArgs,
    credentials: &Credentials,
    plan: &Offer,
    patience: &mut Patience,
) -> Result<Option<Reading>, Failure> {
    let is_asked_for = matches!(args.read.transport, TransportChoice::Shm | TransportChoice::Verbs);
    if !args.dry_run && !is_asked_for {
        return Ok(None);
    }
    let is_sealed = plan.terms.is_some_and(|terms| terms.sealed);
    let tried = async || try_out(&args.read, credentials, is_sealed, args.dry_run).await;
    patience.keep_trying(tried).await.map(Some)
}
