//! Addresses: where a source listens, and where others listen that a reader goes to when that one is lost or refuses.
//!
//! ```text
//!   A (present) ── lost, or it refuses ──▶ B ── lost, or it refuses ──▶ C ──▶ A …      one round is one attempt
//! ```
//!
//! A round begins at the address that was used last, so that a source which was away for a moment goes on with its own
//! snapshot. A source that is reached and refuses for good is an error only if all others have refused too since the
//! last offer. Standbys of which a source tells ([`Addresses::learn`]) come last.

use std::fmt::{Display, Formatter};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use remora_process::events;
use remora_process::exit::{Code, Failure};
use remora_protocol::{MAX_STANDBYS, WaitCause};
use remora_server::HostPort;

/// The addresses of sources of one data set, in the order in which they are tried. All clones are at the same one.
#[derive(Clone, Debug)]
pub struct Addresses {
    first: HostPort,
    others: Arc<[HostPort]>,
    /// Standbys of which a source has told, behind the others.
    learned: Arc<Mutex<Vec<HostPort>>>,
    state: Arc<Mutex<State>>,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    present: usize,
    /// Addresses in a row that have refused for good since the last offer.
    refusals: usize,
}

impl Addresses {
    /// The address that is used at present.
    pub fn present(&self) -> HostPort {
        let present = self.state().present;
        self.at(present)
    }

    /// Whether there is only one.
    pub fn is_one(&self) -> bool {
        self.count() == 1
    }

    /// A source has told where its standbys serve. They are tried behind the others, with the same token, and are held
    /// to the same data set. One that is known already, or is no address, adds nothing.
    pub fn learn(&self, addresses: &[String]) {
        for address in addresses.iter().filter_map(|address| address.parse::<HostPort>().ok()) {
            let is_given = address == self.first || self.others.contains(&address);
            let mut learned = self.learned();
            if is_given || learned.contains(&address) || learned.len() >= MAX_STANDBYS {
                continue;
            }
            tracing::info!(event = events::STANDBY_KNOWN, %address, "{address} serves too if this source is lost");
            learned.push(address);
        }
    }

    /// The same addresses, beginning at the first again, whatever becomes of these.
    pub fn from_the_first(&self) -> Addresses {
        Addresses { state: Arc::default(), ..self.clone() }
    }

    /// Begins to try each address once, from the present one on.
    pub fn round<E: Display>(&self) -> Round<E> {
        let begun = self.state().present;
        Round { addresses: self.clone(), begun, tried: 0, why: None }
    }

    /// What the end of a session means: after a refusal for good another attempt may succeed at the next address, if
    /// not all have refused since the last offer.
    pub fn lost(&self, loss: Loss) -> Loss {
        if loss.passes || self.is_one() {
            return loss;
        }
        let mut state = self.state();
        let (before, count) = (state.present, self.count());
        state.present = (before + 1) % count;
        state.refusals += 1;
        let is_refused_by_all = state.refusals >= count;
        if is_refused_by_all {
            state.refusals = 0;
        }
        let next = state.present;
        drop(state);
        if is_refused_by_all {
            return loss;
        }
        self.moved(before, next, &loss.failure);
        Loss { passes: true, ..loss }
    }

    /// The present one has made an offer.
    pub fn offered(&self) {
        self.state().refusals = 0;
    }

    fn moved(&self, from: usize, to: usize, why: &dyn Display) {
        let (from, to) = (self.at(from), self.at(to));
        tracing::warn!(event = events::SOURCE_CHANGED, %from, %to, "{why}; going to the next source, {to}");
    }

    fn count(&self) -> usize {
        1 + self.others.len() + self.learned().len()
    }

    fn at(&self, index: usize) -> HostPort {
        let Some(other) = index.checked_sub(1) else { return self.first.clone() };
        let learned = || self.learned().get(other.checked_sub(self.others.len())?).cloned();
        self.others.get(other).cloned().or_else(learned).unwrap_or_else(|| self.first.clone())
    }

    /// It is right after every statement, so a panic elsewhere does not invalidate it.
    fn learned(&self) -> MutexGuard<'_, Vec<HostPort>> {
        self.learned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A round of attempts, one at each address.
pub struct Round<E> {
    addresses: Addresses,
    begun: usize,
    tried: usize,
    /// Why those that were tried before cannot be used.
    why: Option<E>,
}

impl<E: Display> Round<E> {
    /// The address to try. Messages name it as the present one.
    pub fn at(&self) -> HostPort {
        self.addresses.present()
    }

    /// Notes the outcome of an attempt. Returns that of the round when it is over: the first success, or, where none
    /// has succeeded, the first error of those that may pass, or else the first of all.
    pub fn outcome<T>(&mut self, attempt: Result<T, E>, may_pass: impl Fn(&E) -> bool) -> Option<Result<T, E>> {
        let (addresses, count) = (&self.addresses, self.addresses.count());
        match (attempt, self.why.take()) {
            (Ok(done), why) => {
                let present = addresses.state().present;
                if let Some(why) = why {
                    addresses.moved(self.begun, present, &why);
                }
                return Some(Ok(done));
            }
            (Err(error), Some(why)) if may_pass(&why) || !may_pass(&error) => {
                tracing::debug!("{error}");
                self.why = Some(why);
            }
            (Err(error), _) => self.why = Some(error),
        }
        self.tried += 1;
        if remora_base::mutation::Mutation::OneSourceTried.is_active() {
            return self.why.take().map(Err);
        }
        addresses.state().present = (self.begun + self.tried) % count;
        if self.tried < count { None } else { self.why.take().map(Err) }
    }
}

impl From<HostPort> for Addresses {
    fn from(first: HostPort) -> Addresses {
        Addresses { first, others: Arc::default(), learned: Arc::default(), state: Arc::default() }
    }
}

impl FromStr for Addresses {
    type Err = String;

    fn from_str(text: &str) -> Result<Addresses, String> {
        let mut all = text.split(',').map(|address| {
            let address = address.trim();
            address.parse::<HostPort>().map_err(|why| format!("{address:?}: {why}"))
        });
        let first = all.next().unwrap_or_else(|| Err("expected HOST:PORT".to_owned()))?;
        let others = all.collect::<Result<Vec<_>, _>>()?;
        Ok(Addresses { others: others.into(), ..Addresses::from(first) })
    }
}

/// The present one.
impl Display for Addresses {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.present().fmt(f)
    }
}

// Loss: why a source cannot be used at present, and how long a reader waits for it.

/// Why the source cannot be used at present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Another attempt may succeed without an operator.
    pub passes: bool,
    /// The source ended the session because the server took nothing.
    pub stalled: bool,
    /// The source does not hold what the server needs next: a server that has loaded can only go to the primary, or
    /// load another snapshot.
    pub history_gone: bool,
    /// What is said of it.
    pub failure: Failure,
}

impl Loss {
    /// A failure after which another attempt may succeed.
    pub fn passing(failure: Failure) -> Loss {
        Loss { passes: true, stalled: false, history_gone: false, failure }
    }
}

impl std::fmt::Display for Loss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.failure.fmt(f)
    }
}

/// How long the source may have nothing to offer if `--retry-for` is shorter. A primary may be busy with another
/// snapshot of its own first. One whose snapshots fail is waited for during `--retry-for` only.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// How long a turn may be away (`--at-once` of a source): 64 replicas with a snapshot of 100 GB, one after the other,
/// at 1 Gb/s take some 14 hours. A source that ends, or whose connection does, ends this wait at once.
const TURN_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// How long a source may have nothing to offer, for this cause.
pub fn wait_limit(cause: WaitCause, retry_for: Duration) -> Duration {
    match cause {
        WaitCause::LastAttemptFailed | WaitCause::CutOff => retry_for,
        WaitCause::Turn => retry_for.max(TURN_LIMIT),
        _ => retry_for.max(WAIT_LIMIT),
    }
}

/// A source that has had nothing to offer for too long.
pub fn no_snapshot(source: &dyn std::fmt::Display, waited: Duration, text: &str) -> Failure {
    let seconds = waited.as_secs();
    let text = format!("the source {source} has had no snapshot to offer for {seconds} s: {text}");
    Failure::passing(Code::Source, text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_process::exit::{Code, Failure};

    use super::*;

    fn three() -> Addresses {
        "a:1,b:2,[::1]:3".parse().unwrap()
    }

    /// Which addresses a round asks if these succeed, and what comes of it.
    fn round(addresses: &Addresses, succeed: &[u16], pass: &[u16]) -> (Vec<u16>, Result<u16, u16>) {
        let mut asked = Vec::new();
        let mut round = addresses.round();
        loop {
            let port = round.at().port;
            asked.push(port);
            let attempt = if succeed.contains(&port) { Ok(port) } else { Err(port) };
            if let Some(done) = round.outcome(attempt, |port| pass.contains(port)) {
                return (asked, done);
            }
        }
    }

    #[test]
    fn a_round_begins_at_the_present_address_and_asks_each_once() {
        let addresses = three();
        assert_eq!(round(&addresses, &[1, 2, 3], &[]), (vec![1], Ok(1)));
        assert_eq!(round(&addresses, &[2, 3], &[]), (vec![1, 2], Ok(2)));
        assert_eq!(addresses.to_string(), "b:2");
        assert_eq!(round(&addresses, &[1, 2, 3], &[]), (vec![2], Ok(2)), "the first one is not asked again");
        assert_eq!(round(&addresses, &[1], &[]), (vec![2, 3, 1], Ok(1)));
        assert_eq!(round(&addresses, &[3], &[]), (vec![1, 2, 3], Ok(3)));
        assert_eq!((addresses.to_string(), addresses.from_the_first().to_string()), ("[::1]:3".into(), "a:1".into()));
    }

    #[test]
    fn a_round_that_fails_is_an_error_that_may_pass_if_one_of_them_may() {
        let addresses = three();
        assert_eq!(round(&addresses, &[], &[]), (vec![1, 2, 3], Err(1)));
        assert_eq!(round(&addresses, &[], &[2, 3]), (vec![1, 2, 3], Err(2)));
        assert_eq!(round(&addresses, &[], &[1, 3]), (vec![1, 2, 3], Err(1)));
        assert_eq!(addresses.to_string(), "a:1");
    }

    #[test]
    fn a_refusal_is_for_good_if_all_have_refused_since_the_last_offer() {
        let passing = Loss::passing(Failure::new(Code::Source, "refused"));
        let refusal = || Loss { passes: false, history_gone: true, ..passing.clone() };
        let one = "a:1".parse::<Addresses>().unwrap();
        assert!(!one.lost(refusal()).passes && one.is_one());
        let addresses = three();
        for expected in ["b:2", "[::1]:3"] {
            let loss = addresses.lost(refusal());
            assert!(loss.passes && loss.history_gone);
            assert_eq!(addresses.to_string(), expected);
        }
        assert!(!addresses.lost(refusal()).passes);
        assert!(addresses.lost(refusal()).passes, "a new count");
        addresses.offered();
        assert!(addresses.lost(refusal()).passes && addresses.lost(refusal()).passes);
        assert!(!addresses.lost(refusal()).passes);
        let before = addresses.to_string();
        assert!(addresses.lost(passing.clone()).passes);
        assert_eq!(addresses.to_string(), before, "the next round begins at the one that was lost");
    }

    #[test]
    fn standbys_of_which_a_source_tells_come_behind_the_others_and_stay_known() {
        let addresses = "a:1,b:2".parse::<Addresses>().unwrap();
        let told = |addresses: &Addresses, ports: &[u16]| {
            addresses.learn(&ports.iter().map(|port| format!("s:{port}")).collect::<Vec<_>>());
        };
        addresses.learn(&["b:2".into(), "no address".into()]);
        told(&addresses, &[3, 4, 3]);
        told(&addresses, &[]);
        assert_eq!(round(&addresses, &[4], &[]), (vec![1, 2, 3, 4], Ok(4)));
        assert_eq!(round(&addresses.from_the_first(), &[], &[]).0, [1, 2, 3, 4]);
        told(&addresses, &(5..100).collect::<Vec<_>>());
        assert_eq!(round(&addresses, &[], &[]).0.len(), 2 + MAX_STANDBYS);
        let one = Addresses::from("a:1".parse::<HostPort>().unwrap());
        assert!(one.is_one());
        one.learn(&["s:2".into()]);
        assert!(!one.is_one());
    }

    #[test]
    fn a_list_has_addresses_between_commas() {
        for wrong in ["", "a", "a:1,", ",a:1", "a:1,,b:2", "a:1 b:2", "a:1,b"] {
            assert!(wrong.parse::<Addresses>().is_err(), "{wrong}");
        }
        assert!("a:1, b:2".parse::<Addresses>().is_ok());
    }
}
