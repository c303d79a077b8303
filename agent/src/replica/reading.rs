//! Reading: by which transport the source's memory can be read, tried before anything is changed.
//!
//! The source exports memory without data (as for `remora probe`), and the agent connects to it as it will connect to
//! the tables: the same choice, the same keys, the same refusals. A conversation of its own does it, so that the source
//! lets go of that memory at once.

use std::sync::Arc;

use remora_fabric::{Memory, Pages, RegionKey, TransportKind};
use remora_protocol::Offer;

use super::source::{Source, Way};
use crate::args::{ReadArgs, ReplicaArgs, TransportChoice};
use crate::conversation::Protection;
use crate::conversation::tokens::Credentials;
use crate::exit::{Code, Failure};
use crate::patience::Patience;
use crate::probe;
use crate::tasks::blocking;
use crate::transports::not_offered;

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
async fn try_out(args: &ReadArgs, credentials: &Credentials, is_sealed: bool) -> Result<Reading, Failure> {
    let mut source = Source::connect(args, credentials).await.map_err(super::source::failure)?;
    let way = source.way(args);
    refuse_what_this_host_lacks(args, &way, is_sealed)?;
    let keys = source.probe_keys(args).await?;
    let offered: Vec<_> = keys.iter().filter_map(|bytes| RegionKey::from_bytes(bytes.clone()).ok()).collect();
    let region = offered.iter().map(RegionKey::length).max().unwrap_or(0);
    let is_offered = offered.iter().any(|key| way.permits(key.transport()));
    let reading = blocking(move || {
        let sink = Memory::create("remora-trial", probe::MOMENT_SINK, Pages::Small).map(Arc::new);
        let sink = sink.map_err(|error| Failure::local(format!("no memory to try the transports with: {error}")))?;
        let (mut peer, transport, why) = way.try_out(keys, is_sealed, &sink)?;
        let rate = probe::in_a_moment(&mut *peer, region);
        let protection = way.protection(transport, is_sealed);
        Ok(Reading { transport, why, protection, rate })
    });
    // What the source does not offer, it will not offer in a moment.
    reading.await.map_err(|failure| {
        let passes = is_offered && failure.code == Code::Source;
        failure.that_passes(passes)
    })
}

/// Looks at the transports for a run with these options. A dry run tries and measures all. A sync with `--transport
/// shm` or `verbs` is told what this host or the source lacks, and connects to the tables themselves: memory to try it
/// with would be memory of the source beyond its `--memory`. `way`: of the conversation that `plan` comes from.
///
/// # Errors
/// As [`try_out`].
pub(super) async fn of_a_run(
    args: &ReplicaArgs,
    credentials: &Credentials,
    plan: &Offer,
    way: &Way,
    patience: &mut Patience,
) -> Result<Option<Reading>, Failure> {
    let (read, is_sealed) = (&args.read, plan.terms.is_some_and(|terms| terms.sealed));
    if args.dry_run {
        return patience.keep_trying(async || try_out(read, credentials, is_sealed).await).await.map(Some);
    }
    let kind = match read.transport {
        TransportChoice::Shm => TransportKind::Shm,
        TransportChoice::Verbs => TransportKind::Verbs,
        _ => return Ok(None),
    };
    refuse_what_this_host_lacks(read, way, is_sealed)?;
    let is_offered = plan.terms.is_none_or(|terms| match kind {
        TransportKind::Shm => terms.offers_shm,
        _ => terms.offers_verbs,
    });
    match is_offered {
        true => Ok(None),
        false => Err(Failure::new(Code::Source, format!("{}: {kind}: {}", unreadable(read), not_offered(kind)))),
    }
}

fn refuse_what_this_host_lacks(args: &ReadArgs, way: &Way, is_sealed: bool) -> Result<(), Failure> {
    match way.why_none(is_sealed) {
        Some(why) => Err(Failure::refused(format!("{}: {why}", unreadable(args)))),
        None => Ok(()),
    }
}

fn unreadable(args: &ReadArgs) -> String {
    format!("the source {} cannot be read as --transport asks", args.source)
}
