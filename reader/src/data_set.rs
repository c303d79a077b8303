//! Data set: what a run is about. The first conversation with a source agrees on it, and every later conversation and
//! every offer is compared with it before anything is asked for or read.
//!
//! A source's name can lead elsewhere at any moment: an address is given to another host, or a name stands for two
//! sources. What tells two data sets apart is the replication history. A source is believed if
//! - its history is the agreed one, or continues it from a byte that the run has seen already, or is a former history
//!   of the agreed one, up to the byte where they part: the rule by which servers continue a replica; or
//! - what the run trusts more than the source says that its primary has another history now (`Witness`). Servers
//!   begin one without a word about the former one: a primary that lost its data, and one that gets its first replica.
//!
//! Everything else is the source of another data set. It is refused by name, as a source that cannot be reached:
//! another attempt may lead to the right one.
//!
//! Which primary is believed about a source, and where it is at this moment, stands at the end.
//!
//! All clones know what one of them has agreed on.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::ReadOptions;
use crate::addresses::Loss;
use crate::source::{Source, unreachable};
use remora_conversation::tokens::Credentials;
use remora_process::exit::{Code, Failure};
use remora_protocol::{Announce, Former, Offer};
use remora_redis::ReplId;
use remora_server::sentinel::Sentinels;
use remora_server::{Facts, HostPort, RefusalKind, Server, ServerError};

/// Former histories that are remembered. Each fail-over adds one; the rest of a run needs the last ones only.
const FORMERS: usize = 8;

/// How long the primary may take to say which history it has. The source is tried again later.
const PRIMARY_LIMIT: Duration = Duration::from_secs(5);

/// What a run is about.
#[derive(Clone, Debug)]
pub struct DataSet {
    agreed: Arc<Mutex<Option<Agreed>>>,
    witness: Witness,
    /// The addresses that a source may name as the primary's (`--expect-primary`).
    expected: Option<KnownPrimaries>,
}

/// What speaks for a history that has nothing in common with the agreed one.
#[derive(Clone, Debug)]
enum Witness {
    /// The primary that the server will follow, asked with the server's own login. If it tells that login nothing about
    /// itself, the same process of the source at the same process of its server.
    Primary { server: Box<Server>, finding: Option<Finding> },
    /// The same process of the source at the same process of its server.
    Server,
    /// The same process of the source, or the key or the name by which each connection proves that it is the right one
    /// (`--source-key`, `--source-name`).
    Source { has_key: bool },
}

/// The data set, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Agreed {
    history: ReplId,
    /// The highest offset in it that the source was seen at.
    offset: u64,
    formers: Vec<Former>,
    /// The source's process.
    process: u64,
    run_id: String,
    /// The captured server, as the source that was agreed on sees it.
    server: String,
}

/// How an offer compares with what was agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compared {
    Same,
    /// No common history; `process`: the same process of the source; `server`: at the same process of its server.
    Unrelated {
        process: bool,
        server: bool,
    },
}

impl DataSet {
    /// The data set of the first source that is compared, for a run without a server.
    pub fn of_a_source(has_key: bool) -> DataSet {
        DataSet { agreed: Arc::default(), witness: Witness::Source { has_key }, expected: None }
    }

    /// The data set of this plan, for the same.
    pub fn of_a_plan(plan: &Offer, has_key: bool) -> DataSet {
        let data_set = DataSet::of_a_source(has_key);
        data_set.note(plan);
        data_set
    }

    /// The data set of a primary that the server will follow, and that was compared with this plan.
    pub fn of_a_primary(server: Server, finding: Option<Finding>, known: &KnownPrimaries, plan: &Offer) -> DataSet {
        // Sentinels name the primary in the source's place.
        let expected = finding.is_none().then(|| known.clone());
        let witness = Witness::Primary { server: Box::new(server), finding };
        let data_set = DataSet { agreed: Arc::default(), witness, expected };
        data_set.note(plan);
        data_set
    }

    /// The data set of a primary that the server follows by itself, and whose history this plan has.
    pub fn of_an_attended_server(plan: &Offer) -> DataSet {
        let data_set = DataSet { agreed: Arc::default(), witness: Witness::Server, expected: None };
        data_set.note(plan);
        data_set
    }

    /// Connects to the source again, or to the next one, and compares it with the data set before anything is asked
    /// for.
    pub async fn connect(
        &self,
        read: &ReadOptions,
        credentials: &Credentials,
        name: Option<&str>,
        server: &str,
    ) -> Result<Source, Loss> {
        let mut round = read.source.round();
        loop {
            let attempt = self.connect_to(&round.at(), read, credentials, (name, server)).await;
            if let Some(done) = round.outcome(attempt, |loss: &Loss| loss.passes) {
                return done;
            }
        }
    }

    async fn connect_to(
        &self,
        at: &HostPort,
        read: &ReadOptions,
        credentials: &Credentials,
        (name, server): (Option<&str>, &str),
    ) -> Result<Source, Loss> {
        let mut source = Source::connect_to(at, credentials).await.map_err(unreachable)?;
        let plan = source.plan(read, name, server).await;
        let plan = plan.map_err(Loss::passing)?;
        self.check(at, source.address(), &plan).await?;
        Ok(source)
    }

    /// Compares what a source offers with the data set. The first offer is what is agreed on.
    ///
    /// # Errors
    /// The source is that of another data set, or nothing says that it is not. It names both. Another attempt may lead
    /// to the right source. A server that is attended does better to ask its primary, and then all sources, at once.
    pub async fn check(&self, source: &HostPort, at: SocketAddr, offer: &Offer) -> Result<(), Loss> {
        let passes = !matches!(self.witness, Witness::Server);
        let checked = self.compare(source, at, offer).await;
        checked.map_err(|failure| Loss { passes, ..Loss::passing(failure) })
    }

    async fn compare(&self, source: &HostPort, at: SocketAddr, offer: &Offer) -> Result<(), Failure> {
        if let Some(known) = &self.expected {
            known.expects((&source.host, at.ip()), &offer.primary).map_err(|why| Failure::new(Code::Source, why))?;
        }
        let compared = match &*self.agreed() {
            Some(agreed) => agreed.compare(offer),
            None => Compared::Same,
        };
        if remora_base::mutation::Mutation::ForeignSourceTaken.is_active() {
            return Ok(());
        }
        let Compared::Unrelated { process, server } = compared else {
            self.note(offer);
            return Ok(());
        };
        let is_believed = match &self.witness {
            Witness::Source { has_key } => Ok(process || *has_key),
            Witness::Server => Ok(server),
            Witness::Primary { server: primary, finding } => match ask(primary, finding.as_ref()).await {
                Ok(facts) => {
                    let is_it = !offer.run_id.is_empty() && facts.run_id.as_deref() == Some(offer.run_id.as_str());
                    Ok(is_it || (facts.replid.is_some() && facts.replid == offer.replid))
                }
                Err(Silence::Forbidden) => Ok(server),
                Err(Silence::Failed(why)) => Err(why),
            },
        };
        match is_believed {
            Ok(true) => {
                let history = offer.replid.map(|replid| replid.to_string());
                tracing::info!(history, "the data set has another replication history now");
                *self.agreed() = None;
                self.note(offer);
                Ok(())
            }
            Ok(false) => Err(self.another(source, offer, "")),
            Err(why) => {
                Err(self.another(source, offer, &format!(", and the primary does not say that it is its own: {why}")))
            }
        }
    }

    /// Whether a primary with these facts has this data set, by its history or as the server that the source captures.
    pub fn is_of(&self, primary: &Facts) -> bool {
        let agreed = self.agreed();
        let Some(agreed) = &*agreed else { return true };
        let is_former = |history| agreed.formers.iter().any(|former| Some(former.replid) == history);
        let has_history = |history| history == Some(agreed.history) || is_former(history);
        agreed.is_captured(primary)
            || has_history(primary.replid)
            || primary.former.is_some_and(|(former, _)| has_history(Some(former)))
    }

    /// Whether the source captures this very server.
    pub fn captures(&self, primary: &Facts) -> bool {
        self.agreed().as_ref().is_some_and(|agreed| agreed.is_captured(primary))
    }

    /// The server that the present source captures, by its run id; `None`: it has not told.
    pub fn captured(&self) -> Option<String> {
        self.agreed().as_ref().map(|agreed| agreed.run_id.clone()).filter(|run_id| !run_id.is_empty())
    }

    /// Notes how far a source of this data set is.
    fn note(&self, offer: &Offer) {
        let Some(history) = offer.replid else { return };
        let mut agreed = self.agreed();
        match &mut *agreed {
            Some(agreed) => agreed.note(history, offer),
            None => *agreed = Some(Agreed::of(history, offer)),
        }
    }

    fn another(&self, source: &HostPort, offer: &Offer, more: &str) -> Failure {
        let agreed = self.agreed();
        let (server, history) = match &*agreed {
            Some(agreed) => (agreed.server.as_str(), agreed.history.to_string()),
            None => ("another server", "none".to_owned()),
        };
        let now = offer.replid.map_or_else(|| "none told".to_owned(), |replid| replid.to_string());
        let why = format!(
            "is the source of another data set: it captures {} with the history {now}, and this run is about {server} with the \
             history {history}{more}; nothing of it is taken. Does the name {source} lead to the source of another primary?",
            offer.primary.source_sees_as
        );
        Failure::new(Code::Source, format!("the source {source} {why}"))
    }

    /// It is right after every statement, so a panic elsewhere does not invalidate it.
    fn agreed(&self) -> MutexGuard<'_, Option<Agreed>> {
        self.agreed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the primary does not say which history it has.
enum Silence {
    /// The server's user may not ask.
    Forbidden,
    Failed(String),
}

async fn ask(primary: &Server, finding: Option<&Finding>) -> Result<Facts, Silence> {
    let asked = async {
        let primary = match finding {
            Some(finding) => {
                let at = finding.ask().await.map_err(|failure| Silence::Failed(failure.to_string()))?;
                primary.at(&at.host, at.port)
            }
            None => primary.clone(),
        };
        let facts = async { Facts::read(&mut primary.connect().await?).await };
        facts.await.map_err(|error| match error {
            ServerError::Refused { kind: RefusalKind::NoPerm, .. } => Silence::Forbidden,
            error => Silence::Failed(error.to_string()),
        })
    };
    let limited = tokio::time::timeout(PRIMARY_LIMIT, asked).await;
    limited.unwrap_or_else(|_| Err(Silence::Failed(format!("no answer for {} s", PRIMARY_LIMIT.as_secs()))))
}

impl Agreed {
    fn of(history: ReplId, offer: &Offer) -> Agreed {
        Agreed {
            history,
            offset: offer.offset,
            formers: offer.former.into_iter().collect(),
            process: offer.process,
            run_id: offer.run_id.clone(),
            server: offer.primary.source_sees_as.clone(),
        }
    }

    fn is_captured(&self, server: &Facts) -> bool {
        !self.run_id.is_empty() && server.run_id.as_deref() == Some(self.run_id.as_str())
    }

    fn compare(&self, offer: &Offer) -> Compared {
        let is_same = match (offer.replid, offer.former) {
            // A server that names no history. What it offers at last has one.
            (None, _) => true,
            (Some(history), _) if history == self.history => true,
            // It has gone on from a byte that the run had seen already, or from a later one.
            (_, Some(former)) if former.replid == self.history && self.offset < former.end => true,
            // It has not yet heard of the present history, and is not beyond where that one parts from it.
            (Some(history), _) => {
                self.formers.iter().any(|former| former.replid == history && offer.offset < former.end)
            }
        };
        if is_same {
            return Compared::Same;
        }
        let process = offer.process == self.process;
        let server = process && !offer.run_id.is_empty() && offer.run_id == self.run_id;
        Compared::Unrelated { process, server }
    }

    fn note(&mut self, history: ReplId, offer: &Offer) {
        if history == self.history {
            self.offset = self.offset.max(offer.offset);
        } else if let Some(former) = offer.former.filter(|former| former.replid == self.history) {
            self.formers.push(former);
            let surplus = self.formers.len().saturating_sub(FORMERS);
            self.formers.drain(..surplus);
            (self.history, self.offset) = (history, offer.offset);
        }
        (self.process, self.run_id) = (offer.process, offer.run_id.clone());
        self.server.clone_from(&offer.primary.source_sees_as);
    }
}

// Primaries: which of them a reader believes a source about, who may be given the server's password, and where the
// primary is at this moment, as the Sentinels say.

// Which primary may be given the password of the replica's server.
//
// The source names the primary. Each holder of the token can pose as a source, and could name an address where it
// listens itself: both the preflight and, at the hand-off, the server send `masterauth` there. So a server with a
// password follows only a primary for which something other than the source's word speaks: `--expect-primary`, proof
// that the source is the right one, what the server followed before, the address at which the operator expects the
// source, or the Sentinels that the operator names.

/// What is known about the primary without the source's word.
#[derive(Clone, Debug)]
pub struct KnownPrimaries {
    /// `--expect-primary`. No other primary is followed if there are any.
    pub expected: Vec<HostPort>,
    /// The source has proved by a key or a certificate that it is the right one, or Sentinels name the primary.
    pub is_vouched_for: bool,
    /// The source's host on the command line, and its address.
    pub source: (String, IpAddr),
    /// What the server followed before the sync.
    pub followed: Option<(String, u16)>,
}

/// What a primary may be given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trust {
    /// The server's password, if it has one.
    Password,
    /// No password. The text says why.
    NoPassword(String),
}

impl KnownPrimaries {
    /// Whether a source with this host name or address, reached at that address, may name that primary.
    ///
    /// # Errors
    /// `--expect-primary` names others.
    pub fn expects(&self, (name, source): (&str, IpAddr), primary: &Announce) -> Result<(), String> {
        if self.expected.is_empty() {
            return Ok(());
        }
        let host = match primary.host.as_str() {
            // The source's own host. Its address may have changed, but a host that was named by one has not.
            "" if name.parse::<IpAddr>().is_ok() => name.to_owned(),
            "" => source.to_string(),
            host => host.to_owned(),
        };
        self.trust(&host, primary.port).map(|_| ())
    }

    /// What the primary at this address may be given.
    ///
    /// # Errors
    /// It must not be followed, with or without a password.
    pub fn trust(&self, host: &str, port: u16) -> Result<Trust, String> {
        let named = HostPort { host: host.to_owned(), port };
        if !self.expected.is_empty() {
            if self.expected.iter().any(|expected| expected.port == port && is_same_host(&expected.host, host)) {
                return Ok(Trust::Password);
            }
            let expected = self.expected.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            return Err(format!(
                "the source names {named} as the primary, and --expect-primary names {expected}: correct the one or the other, and do \
                 not trust this source before"
            ));
        }
        let (source_host, source_address) = &self.source;
        let is_at_the_source = is_same_host(source_host, host) || is_same_host(&source_address.to_string(), host);
        let is_followed =
            self.followed.as_ref().is_some_and(|(followed, at)| *at == port && is_same_host(followed, host));
        if self.is_vouched_for || is_at_the_source || is_followed {
            return Ok(Trust::Password);
        }
        Ok(Trust::NoPassword(format!(
            "the source names {named} as the primary, which the server does not follow now and which is not the source's own address, \
             so a source that lies could get the server's password (masterauth) there: give --expect-primary {named} if that is the \
             primary, or --source-key"
        )))
    }
}

/// Whether both texts are the same address or the same name. Names are not resolved: who controls one can change what
/// it leads to after the check.
fn is_same_host(one: &str, other: &str) -> bool {
    match (one.parse::<IpAddr>(), other.parse::<IpAddr>()) {
        (Ok(one), Ok(other)) => one.to_canonical() == other.to_canonical(),
        _ => one.eq_ignore_ascii_case(other),
    }
}

// Finding: where the primary is at this moment, as the Sentinels say.
//
// A fail-over can come at any moment of a sync. So the agent asks again before each hand-off, and the server is told
// the address exactly as Sentinel writes it: with any other text Sentinel would point the server there again.

/// How old the answer may be that the server is handed over by. The primary was asked meanwhile whether it continues
/// the server, which takes milliseconds.
const FRESH: Duration = Duration::from_secs(1);

/// Finds the primary. It is cheap to clone, and all clones know what one has found.
#[derive(Clone, Debug)]
pub struct Finding {
    sentinels: Sentinels,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    /// Where the primary was when it was last asked for.
    last: HostPort,
    /// When the primary there said that it would continue the server.
    covered: Option<Instant>,
}

impl Finding {
    /// Asks the Sentinels for the first time.
    ///
    /// # Errors
    /// None of them says where the primary is.
    pub async fn begin(sentinels: Sentinels) -> Result<Finding, Failure> {
        let last = sentinels.primary().await?;
        Ok(Finding { sentinels, state: Arc::new(Mutex::new(State { last, covered: None })) })
    }

    /// Those that are asked.
    pub fn sentinels(&self) -> &Sentinels {
        &self.sentinels
    }

    /// Asks the Sentinels again.
    ///
    /// # Errors
    /// None of them says where the primary is.
    pub async fn ask(&self) -> Result<HostPort, Failure> {
        let now = self.sentinels.primary().await?;
        let mut state = self.state();
        if state.last != now {
            tracing::warn!(former = %state.last, %now, "Sentinel names another primary");
            *state = State { last: now.clone(), covered: None };
        }
        Ok(now)
    }

    /// Where the primary was when it was last asked for.
    pub fn last(&self) -> HostPort {
        self.state().last.clone()
    }

    /// The primary at this address would continue the server.
    pub fn covered(&self, at: &HostPort) {
        let mut state = self.state();
        if state.last == *at {
            state.covered = Some(Instant::now());
        }
    }

    /// Where to point the server now.
    ///
    /// # Errors
    /// None of the Sentinels says where the primary is.
    pub async fn for_the_hand_off(&self) -> Result<HostPort, Failure> {
        let covered = {
            let state = self.state();
            state.covered.filter(|at| at.elapsed() < FRESH).map(|_| state.last.clone())
        };
        match covered {
            Some(at) => Ok(at),
            None => self.ask().await,
        }
    }

    /// The state is right after every statement, so a panic elsewhere does not invalidate it.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use remora_protocol::{Announce, TableOffer};

    fn replid(digit: char) -> ReplId {
        digit.to_string().repeat(40).parse().unwrap()
    }

    /// What a source offers whose server is at this offset of this history, which may continue another one.
    fn plan(history: char, former: Option<(char, u64)>, offset: u64) -> Offer {
        let table = || TableOffer {
            generation: 0,
            first_offset: 0,
            slot_size: 0,
            slots: 0,
            retained: false,
            keys: Vec::new(),
            seal: Vec::new(),
            compressed: false,
        };
        Offer {
            generation: 0,
            replid: Some(replid(history)),
            former: former.map(|(history, end)| Former { replid: replid(history), end }),
            offset,
            snapshot: table(),
            journal: table(),
            primary: Announce {
                host: "db".into(),
                port: 6379,
                tls: false,
                source_sees_as: format!("redis://{history}:6379"),
            },
            server: "Redis 7.0.15".into(),
            run_id: format!("run {history}"),
            process: 1,
            backlog_bytes: 0,
            write_rate: 0,
            upstream: None,
            warning: String::new(),
            obstacle: String::new(),
            terms: None,
        }
    }

    /// The same of another process of a source.
    fn of_another(offer: Offer) -> Offer {
        Offer { process: 2, ..offer }
    }

    /// The same of a process that was not met before.
    fn of_a_stranger(offer: Offer) -> Offer {
        Offer { process: 3, ..offer }
    }

    fn check(data_set: &DataSet, offer: &Offer) -> Result<(), Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (name, at) = ("src:7379".parse().unwrap(), "10.0.0.1:7379".parse().unwrap());
        runtime.block_on(data_set.check(&name, at, offer)).map_err(|loss| loss.failure)
    }

    fn at_a_100() -> DataSet {
        DataSet::of_a_plan(&plan('a', None, 100), false)
    }

    #[test]
    fn a_source_of_the_same_history_or_of_one_that_goes_on_from_it_is_taken() {
        let same = [
            plan('a', None, 7),
            plan('a', Some(('9', 3)), 500),
            // A fail-over at the very byte that was seen last, and a later one.
            plan('b', Some(('a', 101)), 101),
            plan('b', Some(('a', 900)), 950),
        ];
        for offer in same {
            assert_eq!(check(&at_a_100(), &of_another(offer.clone())), Ok(()), "{offer:?}");
        }
    }

    #[test]
    fn a_source_of_another_data_set_is_refused_and_both_are_named() {
        let others = [
            plan('b', None, 100),
            // A copy that was started on an older file of the same server: it parted before the byte that was seen.
            plan('b', Some(('a', 100)), 300),
            plan('b', Some(('c', 900)), 100),
        ];
        for offer in others {
            let refused = check(&at_a_100(), &of_another(offer.clone())).unwrap_err();
            assert_eq!(refused.code, Code::Source);
            for named in ["src:7379", "redis://a:6379", "redis://b:6379", &"a".repeat(40), &"b".repeat(40)] {
                assert!(refused.message.contains(named), "{named}: {refused}");
            }
        }
    }

    #[test]
    fn after_a_fail_over_a_source_that_lags_is_taken_up_to_where_the_histories_part() {
        let data_set = at_a_100();
        check(&data_set, &of_another(plan('b', Some(('a', 201)), 300))).unwrap();
        assert_eq!(check(&data_set, &of_another(plan('a', None, 200))), Ok(()));
        // The former primary, which clients still write to.
        assert!(check(&data_set, &of_a_stranger(plan('a', None, 201))).is_err());
        assert_eq!(check(&data_set, &of_another(plan('b', None, 400))), Ok(()), "the present history still is");
        check(&data_set, &of_another(plan('c', Some(('b', 500)), 600))).unwrap();
        assert!(check(&data_set, &of_a_stranger(plan('d', Some(('b', 700)), 700))).is_err(), "from a former one");
    }

    #[test]
    fn the_offset_that_counts_is_the_highest_that_was_seen() {
        let data_set = at_a_100();
        check(&data_set, &plan('a', None, 800)).unwrap();
        check(&data_set, &plan('a', None, 300)).unwrap();
        assert!(check(&data_set, &of_another(plan('b', Some(('a', 800)), 900))).is_err());
        assert_eq!(check(&data_set, &of_another(plan('b', Some(('a', 801)), 900))), Ok(()));
    }

    #[test]
    fn a_run_without_a_server_believes_the_same_process_of_the_source_or_its_key() {
        assert_eq!(check(&at_a_100(), &plan('b', None, 1)), Ok(()), "its server was restarted without its data");
        let proven = DataSet::of_a_plan(&plan('a', None, 100), true);
        assert_eq!(check(&proven, &of_another(plan('b', None, 1))), Ok(()));
        // What was agreed on is the new history then.
        assert!(check(&at_a_100(), &of_another(plan('b', None, 1))).is_err());
    }

    #[test]
    fn the_sync_of_a_server_that_is_attended_believes_a_new_history_of_the_same_server_only() {
        let data_set = DataSet::of_an_attended_server(&plan('a', None, 100));
        // Its first replica: a primary begins a history then.
        let begun = Offer { run_id: "run a".into(), ..plan('b', None, 101) };
        assert!(check(&data_set, &plan('b', None, 101)).is_err(), "another server");
        assert!(check(&data_set, &Offer { run_id: String::new(), ..begun.clone() }).is_err(), "nothing is known of it");
        assert!(check(&data_set, &of_another(begun.clone())).is_err(), "another source");
        assert_eq!(check(&data_set, &begun), Ok(()));
        assert!(check(&data_set, &of_another(plan('a', None, 100))).is_err(), "the former history is another one now");
    }

    /// A primary that an attended server asks while its sync is under way.
    #[test]
    fn a_primary_is_of_the_data_set_by_its_history_or_as_the_captured_server() {
        let data_set = DataSet::of_an_attended_server(&plan('a', Some(('c', 50)), 100));
        let is_of = |history: char, former: Option<char>, run_id: &str| {
            let former = former.map(|former| (replid(former), 70));
            let (replid, run_id) = (Some(replid(history)), Some(run_id.to_owned()));
            data_set.is_of(&Facts { replid, former, run_id, ..Facts::default() })
        };
        assert!(is_of('a', None, "any"));
        assert!(is_of('b', Some('a'), "any"), "one that was promoted");
        assert!(is_of('b', None, "run a"), "the captured server, which begins a history with its first replica");
        assert!(!is_of('b', None, "any"), "another primary");
        assert!(!is_of('b', Some('d'), "any"), "and one with a past of its own");
        assert!(!data_set.captures(&Facts::default()), "a server that does not name its run");
    }

    #[test]
    fn the_first_source_is_what_is_agreed_on() {
        let data_set = DataSet::of_a_source(false);
        check(&data_set, &Offer { replid: None, ..plan('d', None, 1) }).unwrap();
        check(&data_set, &plan('a', None, 100)).unwrap();
        assert!(check(&data_set.clone(), &of_another(plan('b', None, 100))).is_err());
    }

    #[test]
    fn few_former_histories_are_remembered() {
        let data_set = at_a_100();
        let histories: Vec<char> = "abcdef0123456789".chars().collect();
        for (pair, offset) in histories.windows(2).zip((200..).step_by(100)) {
            check(&data_set, &of_another(plan(pair[1], Some((pair[0], offset)), offset))).unwrap();
        }
        assert_eq!(data_set.agreed().as_ref().unwrap().formers.len(), FORMERS);
        assert!(check(&data_set, &of_a_stranger(plan('a', None, 10))).is_err());
        assert_eq!(check(&data_set, &of_another(plan('7', None, 10))), Ok(()));
    }

    fn known() -> KnownPrimaries {
        KnownPrimaries {
            expected: Vec::new(),
            is_vouched_for: false,
            source: ("db1".into(), "10.0.0.1".parse().unwrap()),
            followed: Some(("10.0.0.7".into(), 6379)),
        }
    }

    fn gets_the_password(known: &KnownPrimaries, host: &str, port: u16) -> bool {
        known.trust(host, port) == Ok(Trust::Password)
    }

    #[test]
    fn the_password_is_for_the_sources_address_and_for_what_the_server_followed_before_only() {
        let known = known();
        for (host, port) in [("db1", 1), ("DB1", 6379), ("10.0.0.1", 6379), ("::ffff:10.0.0.1", 1), ("10.0.0.7", 6379)]
        {
            assert!(gets_the_password(&known, host, port), "{host}:{port}");
        }
        for (host, port) in [("10.0.0.7", 6380), ("10.0.0.2", 6379), ("db2", 6379), ("db1.example", 6379), ("", 1)] {
            let Ok(Trust::NoPassword(why)) = known.trust(host, port) else { panic!("{host}:{port}") };
            assert!(why.contains(&format!("--expect-primary {host}:{port}")), "{why}");
        }
    }

    #[test]
    fn a_source_that_proved_who_it_is_may_name_any_primary() {
        let known = KnownPrimaries { is_vouched_for: true, ..known() };
        assert!(gets_the_password(&known, "elsewhere", 6379));
    }

    #[test]
    fn with_expect_primary_no_other_primary_is_followed_whatever_else_speaks_for_it() {
        let expected = vec!["[fd00::1]:6379".parse().unwrap(), "db9:6390".parse().unwrap()];
        let known = KnownPrimaries { expected, is_vouched_for: true, ..known() };
        assert!(gets_the_password(&known, "fd00:0:0::1", 6379) && gets_the_password(&known, "db9", 6390));
        for (host, port) in [("db9", 6379), ("db1", 6379), ("10.0.0.7", 6379)] {
            let why = known.trust(host, port).unwrap_err();
            assert!(why.contains("[fd00::1]:6379, db9:6390") && why.contains(&format!("{host}:{port}")), "{why}");
        }
    }
}
