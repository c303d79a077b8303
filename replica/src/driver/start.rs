//! Start: takes what the preflight has found, and starts the tasks of a sync.

use std::sync::Arc;
use std::time::Instant;

use rustls::ServerConfig;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::{Notify, oneshot};

use super::display::Display;
use super::server::{Hands, Intercepted, Keeper, ServerTask, Watched};
use super::watches::{self, Coverage};
use super::{Driver, Facts, FromServer};
use crate::attend::gate::Gate;
use crate::attend::guide::Watcher;
use crate::attend::passage::Login;
use crate::control::{Control, Guard};
use crate::exact::Judgement;
use crate::machine::{Replica, Rules};
use crate::options::{Options, SyncOptions};
use crate::preflight::{Primary, Target};
use crate::record::Record;
use remora_base::pace::Backoff;
use remora_conversation::tokens::TokenFiles;
use remora_delivery as delivery;
use remora_delivery::conversion::Conversion;
use remora_delivery::link::candidates::{Candidates, LinkLogin, Locality, Newcomer};
use remora_process::exit::Failure;
use remora_protocol::MAX_NAME_BYTES;
use remora_reader::data_set::DataSet;
use remora_reader::meter::Meter;
use remora_reader::relay::Relay;
use remora_reader::source::{Session, Sinks, Source};
use remora_reader::spool::Spool;
use remora_server::{CONVERTED, HostPort, PinSizes, ServerUrl};

/// The start of a sync.
pub(crate) struct Setup {
    pub(crate) options: Options,
    pub(crate) tokens: TokenFiles,
    pub(crate) control: Control,
    pub(crate) record: Record,
    pub(crate) target: Target,
    pub(crate) primary: Primary,
    pub(crate) source: Source,
    pub(crate) data_set: DataSet,
    pub(crate) link_tls: Option<Arc<ServerConfig>>,
    /// The slots that an earlier agent has left in the state folder.
    pub(crate) spool: Option<Spool>,
}

/// The start of a sync of a server whose connections to its primary are intercepted.
pub(crate) struct Attending {
    pub(crate) options: SyncOptions,
    pub(crate) tokens: TokenFiles,
    pub(crate) control: Control,
    /// What the server says of itself.
    pub(crate) server: remora_server::Facts,
    /// The primary that it follows.
    pub(crate) primary: (String, u16),
    /// How it has logged in there.
    pub(crate) login: Login,
    pub(crate) source: Source,
    pub(crate) data_set: DataSet,
    /// How the copy is converted for the server.
    pub(crate) conversion: Option<Conversion>,
    pub(crate) gate: Gate,
    /// The source cannot tell whether the primary would continue the server: it captures another one.
    pub(crate) asks_primary: bool,
    /// What the Sentinels say of the group, if they are asked.
    pub(crate) watcher: Option<Watcher>,
    /// Its connections that have sent `PSYNC`. Their end ends what is lent to other replicas.
    pub(crate) arrivals: UnboundedReceiver<Newcomer>,
    /// Told when the server needs the sync no more, and other replicas still read here.
    pub(crate) lingers: oneshot::Sender<()>,
}

/// What a sync needs however the server comes to it.
struct Ways {
    options: Arc<SyncOptions>,
    tokens: TokenFiles,
    source: Source,
    candidates: Candidates,
    arrivals: Option<UnboundedReceiver<Newcomer>>,
    lingers: Option<oneshot::Sender<()>>,
    facts: Facts,
    run_id: Option<String>,
    coverage: Coverage,
    spool: Option<Spool>,
    conversion: Option<Conversion>,
}

impl Facts {
    fn of(
        control: &Control,
        server: &remora_server::Facts,
        primary: (&str, u16),
        spool: Option<&Spool>,
        data_set: DataSet,
    ) -> Facts {
        let url = control.server().url();
        Facts {
            server: url.to_string(),
            name: default_name(url),
            kind: server.name(),
            primary: format!("{}:{}", primary.0, primary.1),
            finding: None,
            asks_primary: false,
            data_set,
            spooled: spool.map(|spool| (spool.snapshot(), spool.held_below())),
        }
    }
}

/// What a server is called at the source if the operator gives it no name: its address, which stays the same when the
/// agent connects again. A source puts the agent's host before a port without one.
fn default_name(url: &ServerUrl) -> String {
    match url.host_and_port() {
        Some((host, port)) if !url.is_local_only() && host.len() + ":65535".len() <= MAX_NAME_BYTES => {
            HostPort { host: host.to_owned(), port }.to_string()
        }
        Some((_, port)) => format!(":{port}"),
        None => String::new(),
    }
}

impl Driver {
    /// Takes a port for the link and starts the tasks. Changes nothing on the server yet.
    pub(crate) async fn begin(setup: Setup) -> Result<Driver, Failure> {
        let Setup { options, tokens, control, record, target, primary, source, data_set, link_tls, spool } = setup;
        let sync = Arc::new(options.of_a_sync());
        let options = Arc::new(options);
        let locality = Locality::of(control.present(), target.facts.process_id).or_listen(options.listen);
        let (listener, link) = locality.take_port()?;
        let needs_guard = matches!(target.link_login, LinkLogin::Secret { .. });
        let link_tls = link_tls.filter(|_| target.tls_replication);
        let candidates = Candidates::new(listener, link_tls, target.link_login.access(), locality);
        let link_failure = candidates.failure();
        let facts = Facts::of(&control, &target.facts, (&primary.host, primary.port), spool.as_ref(), data_set);
        let finding = primary.finding.clone();
        let asks_primary = primary.is_asked;
        let coverage = Coverage::start(primary.server.clone(), finding.clone());
        let facts = Facts { finding, asks_primary, kind: target.name(), ..facts };
        let (run_id, conversion) = (target.facts.run_id.clone(), target.conversion.clone());
        let listening = options.stay.then(|| watches::start(control.server().clone()));
        let (arrivals, lingers) = (None, None);
        let ways = Ways {
            options: sync,
            tokens,
            source,
            candidates,
            arrivals,
            lingers,
            facts,
            run_id,
            coverage,
            spool,
            conversion,
        };
        let keeper = |meter, judgement, hurry| {
            let watched = Watched { meter, judgement, link_failure, hurry };
            Hands::Commands(Box::new(Keeper::new(options, control, record, target, primary, link, watched)))
        };
        let mut driver = Driver::assemble(ways, keeper).await?;
        driver.from_server.guard = needs_guard.then(Guard::start).flatten();
        driver.from_server.listening = listening;
        Ok(driver)
    }

    /// Starts the tasks for a server that is on its way to its primary, and whose connections are intercepted. Changes
    /// nothing on the server, then or later.
    pub(crate) async fn begin_attending(attending: Attending) -> Result<Driver, Failure> {
        let Attending { options, tokens, control, server, primary, source, data_set, conversion, .. } = attending;
        let Attending { gate, login, asks_primary, watcher, arrivals, lingers, .. } = attending;
        let options = Arc::new(options);
        let facts = Facts::of(&control, &server, (&primary.0, primary.1), None, data_set);
        let kind = if conversion.is_some() { facts.kind.clone() + CONVERTED } else { facts.kind.clone() };
        let facts = Facts { asks_primary, kind, ..facts };
        let (candidates, run_id) = (Candidates::without_a_port(), server.run_id);
        let (arrivals, lingers) = (Some(arrivals), Some(lingers));
        let (coverage, spool) = (Coverage::start_as_the_server(login), None);
        let ways =
            Ways { options, tokens, source, candidates, arrivals, lingers, facts, run_id, coverage, spool, conversion };
        let hands = |_, judgement, _| {
            Hands::Interception(Box::new(Intercepted::new(control, primary, gate, watcher, judgement)))
        };
        Driver::assemble(ways, hands).await
    }

    async fn assemble(
        ways: Ways,
        keeper: impl FnOnce(Arc<Meter>, Judgement, Arc<Notify>) -> Hands,
    ) -> Result<Driver, Failure> {
        let Ways { options, tokens, source, candidates, arrivals, lingers, facts, run_id, coverage, spool, conversion } =
            ways;
        let facts = Facts { name: options.name.clone().unwrap_or(facts.name), ..facts };
        let no_handler = |error| Failure::local(format!("signals can't be caught: {error}"));
        let signals = (
            signal(SignalKind::interrupt()).map_err(no_handler)?,
            signal(SignalKind::terminate()).map_err(no_handler)?,
        );
        let (meter, judgement, hurry) = (Arc::new(Meter::default()), Judgement::default(), Arc::new(Notify::new()));
        let sinks = Sinks::new(options.memory.get());
        let (tell, notices) = mpsc::unbounded_channel();
        let delivery = delivery::spawn(delivery::Setup {
            candidates,
            spool: options.told.state_dir.clone(),
            found: spool,
            conversion,
            backlog_limit: sinks.backlog_limit(),
            meter: meter.clone(),
            notices: tell,
        });
        let delivery = delivery.map_err(|error| Failure::local(format!("no thread for the delivery: {error}")))?;
        let rules = Rules {
            retry_for: options.read.retry_for,
            linger: options.linger,
            stay: options.told.stay,
            intercepted: arrivals.is_some(),
            replace: options.told.replaces,
            server: facts.server.clone(),
            source: options.read.source.to_string(),
            // Its address may change.
            primary: facts
                .finding
                .as_ref()
                .map_or_else(|| facts.primary.clone(), |found| found.sentinels().name().to_owned()),
            run_id,
            sizes: PinSizes::SERVERS,
        };
        let name = options.name.clone().unwrap_or_else(|| facts.server.clone());
        let (read, relay, has_folder) = (options.read.clone(), options.relay.clone(), options.told.state_dir.is_some());
        let relay = Relay::open(read, relay, has_folder, &tokens, name, meter.clone(), &source).await?;
        let way = source.way(&options.read);
        let now = Instant::now();
        Ok(Driver {
            credentials: tokens.credentials(options.source_key),
            machine: Replica::begin(now, rules, Backoff::from_system()),
            facts,
            session: Some(Session::start(source, way, &options.read.source)),
            server: ServerTask::start(keeper(meter.clone(), judgement.clone(), hurry.clone()), hurry),
            relay,
            delivery,
            from_server: FromServer {
                notices,
                is_intercepted: arrivals.is_some(),
                arrivals,
                lingers,
                listening: None,
                guard: None,
            },
            meter,
            judgement,
            sinks,
            connecting: mpsc::unbounded_channel(),
            calling: None,
            tables: None,
            introduction: None,
            answer: None,
            display: Display::new(now),
            coverage,
            signals,
            published: Ok(()),
            options,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_server_is_called_by_its_address_which_only_a_source_knows_of_a_loopback_one() {
        for (url, name) in [
            ("redis://10.0.0.7:7002", "10.0.0.7:7002"),
            ("rediss://[fd00::1]:7002/3", "[fd00::1]:7002"),
            ("redis://127.0.0.1:7002", ":7002"),
            ("redis://localhost", ":6379"),
            ("unix:///run/redis.sock", ""),
        ] {
            assert_eq!(default_name(&url.parse().unwrap()), name, "{url}");
        }
        let long = format!("redis://{}:7002", "h".repeat(MAX_NAME_BYTES));
        assert_eq!(default_name(&long.parse().unwrap()), ":7002");
    }
}
