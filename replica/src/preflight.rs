//! Preflight: finds everything that can be known to go wrong before anything is changed.
//!
//! [`target`] looks at the replica's own server, [`primary`] at the way from there to the primary. Each refusal names
//! the thing and says what to do.

use std::ffi::OsString;
use std::fs::File;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use super::record::{LOGIN, Raised, Record, SAVE};
use crate::options::{OnFailure, Options};
use remora_base::units::counted;
use remora_delivery::link::candidates::{LinkLogin, Locality, PrimaryLogin, may_be_a_secret};
use remora_delivery::payload::{Conversion, check_field_ttls};
use remora_process::exit::{Code, Failure};
use remora_protocol::Offer;
use remora_reader::data_set::{DataSet, Finding, KnownPrimaries, Trust};
use remora_server::permission::{ALWAYS, Needed, Permission, TO_REPLICATE};
use remora_server::sentinel::{self, Sentinels};
use remora_server::{
    CONVERTED, Client, Credentials, Facts, HostPort, Password, RefusalKind, Role, Server, ServerError, ServerUrl, Task,
    TlsOptions,
};

/// Examines the replica's server, and whether it can follow a link.
pub(super) async fn target(
    server: &Server,
    client: &mut Client,
    record: &Record,
    link_has_a_certificate: bool,
) -> Result<Target, Failure> {
    let (target, url) = (any_target(server, client, record).await?, server.url());
    if target.facts.cluster_enabled == Some(true) {
        return Err(Failure::refused(format!(
            "the server {url} runs in cluster mode, where servers refuse REPLICAOF, so it cannot be made a replica by the link; \
             remora attend beside it serves CLUSTER REPLICATE, and --delivery intercept serves a node that is a replica already"
        )));
    }
    if target.tls_replication && !link_has_a_certificate {
        return Err(Failure::refused(format!(
            "the server {url} replicates by TLS only (tls-replication yes), so our link to it must speak TLS: give a certificate \
             that it accepts with --link-cert and --link-key"
        )));
    }
    Ok(target)
}

/// Examines the replica's server, however it will get the snapshot.
pub(super) async fn any_target(server: &Server, client: &mut Client, record: &Record) -> Result<Target, Failure> {
    let (facts, url) = (Facts::read(client).await?, server.url());
    let unfinished = facts.link.as_ref().is_some_and(|link| record.is_our_link(&link.host, link.port));
    if facts.loading == Some(true) && !unfinished {
        return Err(Failure::passing(Code::Server, format!("the server {url} is loading its data set (-LOADING)")));
    }
    let tls_replication = client.config_get("tls-replication").await?.as_deref() == Some("yes");
    let login = login(client, record).await?;
    let link_login = LinkLogin::choose(server, client, &login).await?;
    Ok(Target {
        login,
        link_login,
        tls: if tls_replication { tls_files(client).await? } else { TlsOptions::default() },
        tls_replication,
        diskless_load: client.config_get("repl-diskless-load").await?,
        databases: client.config_get("databases").await?.and_then(|count| count.parse().ok()),
        reads_newer: client.config_get("rdb-version-check").await?.as_deref() == Some("relaxed"),
        conversion: None,
        unfinished,
        facts,
    })
}

/// The server's login to its primary, without what an earlier agent may have left there.
pub(super) async fn login(client: &mut Client, record: &Record) -> Result<PrimaryLogin, ServerError> {
    let user = match client.config_bytes("masteruser").await? {
        None => client.config_bytes("primaryuser").await?,
        user => user,
    };
    let mut login = PrimaryLogin { user: user.unwrap_or_default(), password: None, setting: None };
    for setting in LOGIN {
        if let Some(present) = client.config_bytes(setting).await? {
            login.setting = Some(setting);
            login.password =
                Some(record.original(setting, &present)).filter(|bytes| !bytes.is_empty()).map(Password::new);
            break;
        }
    }
    Ok(login)
}

/// The files with which the server itself speaks TLS to a primary. The agent runs beside the server and can often read
/// them; otherwise `--tls-ca` and the options beside it must name them.
pub(super) async fn tls_files(client: &mut Client) -> Result<TlsOptions, ServerError> {
    let mut files = Vec::new();
    for name in ["tls-ca-cert-file", "tls-client-cert-file", "tls-client-key-file", "tls-cert-file", "tls-key-file"] {
        let path = client.config_bytes(name).await?.filter(|path| !path.is_empty()).map(path_of);
        files.push(path.filter(|path| File::open(path).is_ok()));
    }
    let [ca, client_cert, client_key, cert, key] = <[_; 5]>::try_from(files).unwrap_or_default();
    let pair = client_cert.zip(client_key).or_else(|| cert.zip(key));
    let (certificate, key) = (pair.clone().map(|pair| pair.0), pair.map(|pair| pair.1));
    Ok(TlsOptions { ca, certificate, key, ..TlsOptions::default() })
}

/// The path that a setting of a server names.
pub(super) fn path_of(bytes: Vec<u8>) -> PathBuf {
    OsString::from_vec(bytes).into()
}

/// Refuses a server that holds data, or is in step with a primary, unless `--replace` is given.
pub(super) fn refuse_to_overwrite(options: &Options, server: &Server, target: &Target) -> Result<(), Failure> {
    if options.replace || target.unfinished {
        return Ok(());
    }
    let (facts, url) = (&target.facts, server.url());
    let keys = facts.keys();
    if keys > 0 {
        return Err(Failure::refused(format!(
            "the server {url} holds {}, which a sync would replace; give --replace if that is wanted",
            counted(keys, "key")
        )));
    }
    let libraries = facts.libraries.unwrap_or(0);
    if libraries > 0 {
        return Err(Failure::refused(format!(
            "the server {url} holds no keys, but {libraries} function librar{}, which a sync would replace; give --replace if that is \
             wanted",
            if libraries == 1 { "y" } else { "ies" }
        )));
    }
    match (&facts.role, &facts.link) {
        (Some(Role::Replica), Some(link)) if link.up == Some(true) => Err(Failure::refused(format!(
            "the server {url} is a replica of {}:{} already, and in step; give --replace to make it follow another",
            link.host, link.port
        ))),
        _ => Ok(()),
    }
}

/// The primary, as the replica's server will use it.
#[derive(Clone, Debug)]
pub(super) struct Primary {
    pub(super) host: String,
    pub(super) port: u16,
    /// Whether the agent always asks the primary itself if it would continue the server: it is another server than the
    /// one that the source captures, and tells its position.
    pub(super) is_asked: bool,
    /// Whether the server's password may be sent there.
    pub(super) trust: Trust,
    /// How to find it again after a fail-over.
    pub(super) finding: Option<Finding>,
    /// The fail-over time that the Sentinels are given for the time of the sync.
    pub(super) raise_to: Option<Duration>,
    /// What it has said of itself; `None` if it does not tell the server's user.
    pub(super) facts: Option<Facts>,
    /// Whether it has modules that may have put data into the snapshot.
    has_modules: bool,
    /// Which primaries may be followed.
    known: KnownPrimaries,
    /// The primary with the login of the replica's server.
    pub(super) server: Server,
    /// When it was compared with the replica's server.
    compared: Instant,
}

/// How long the preflight may be ago until the primary is compared once more before the first change. A wait for a
/// snapshot is longer.
const COMPARED_FOR: Duration = Duration::from_secs(1);

impl Primary {
    /// Compares the primary with the replica's server once more, if the preflight was not just now: clients may have
    /// used another database since, or a module was loaded. A primary that does not answer is not an obstacle.
    pub(super) async fn compare_again(&self, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
        if self.compared.elapsed() < COMPARED_FOR {
            return Ok(());
        }
        let facts = async { Facts::read(&mut self.server.connect().await?).await };
        match facts.await {
            Ok(facts) => check_contents(&facts, target, url),
            Err(error) => {
                tracing::debug!("{error}; the primary is not compared again");
                Ok(())
            }
        }
    }
}

impl Primary {
    /// Bytes of its data, as it says.
    pub(super) fn data(&self) -> Option<u64> {
        self.facts.as_ref()?.used_memory_dataset
    }

    /// How many full copies it has sent; `None` if it does not tell the server's user.
    pub(super) async fn full_copies(&self) -> Option<u64> {
        let count = async { self.server.connect().await?.info("stats").await };
        count.await.ok()?.number("sync_full")
    }

    /// Whether this address leads to it too: to a server of the same history.
    pub(super) async fn is_at(&self, host: &str, port: u16, plan: &Offer) -> bool {
        if (host, port) == (self.host.as_str(), self.port) {
            return true;
        }
        let server = self.server.at(host, port);
        let facts = async { Facts::read(&mut server.connect().await?).await };
        let facts = facts.await.unwrap_or_else(|error| {
            tracing::debug!("{error}; whether it is the primary is not known");
            Facts::default()
        });
        facts.run_id.as_deref() == Some(plan.run_id.as_str()) || (facts.replid.is_some() && facts.replid == plan.replid)
    }

    /// The primary, with the login of the replica's server.
    pub(super) fn as_server(&self) -> Server {
        self.server.clone()
    }

    /// Whether it has modules that may have put data into the snapshot.
    pub(super) fn has_modules_with_data(&self) -> bool {
        self.has_modules
    }

    /// What a sync of it is about, that begins with this plan.
    pub(super) fn data_set(&self, plan: &Offer) -> DataSet {
        DataSet::of_a_primary(self.server.clone(), self.finding.clone(), &self.known, plan)
    }

    /// Where it is.
    pub(super) fn address(&self) -> (String, u16) {
        (self.host.clone(), self.port)
    }

    /// It is at this address from now on.
    ///
    /// # Errors
    /// No server may follow it there.
    pub(super) fn move_to(&mut self, at: &HostPort) -> Result<(), Failure> {
        if (at.host.as_str(), at.port) != (self.host.as_str(), self.port) {
            self.trust = self.known.trust(&at.host, at.port).map_err(|why| Failure::new(Code::SyncFailed, why))?;
            self.server = self.server.at(&at.host, at.port);
            (self.host, self.port) = (at.host.clone(), at.port);
        }
        Ok(())
    }

    /// Asks the Sentinels where it is, if there are any. If they do not say, it is where it was.
    pub(super) async fn find_again(&mut self) {
        let Some(finding) = self.finding.clone() else { return };
        let moved = match finding.ask().await {
            Ok(at) => self.move_to(&at),
            Err(failure) => Err(failure),
        };
        if let Err(failure) = moved {
            tracing::warn!("{failure}");
        }
    }
}

/// By what a primary is known.
pub(super) struct Known {
    pub(super) primaries: KnownPrimaries,
    /// The Sentinels.
    pub(super) finding: Option<Finding>,
    /// The address by which the source was reached.
    pub(super) source: SocketAddr,
}

/// How long a fail-over may take until the primary and the source are of one history. Sentinels need some seconds, and
/// `down-after-milliseconds` before.
const FAIL_OVER_LIMIT: Duration = Duration::from_secs(60);

/// How long a replica may take to continue at a new primary. A healthy one takes a second. An address that is wrong is
/// refused after this time.
const SETTLE_LIMIT: Duration = Duration::from_secs(10);

/// Why a primary is refused.
pub(super) struct Unfit {
    pub(super) failure: Failure,
    /// How long it may be another one in a moment: a fail-over is under way, or just over.
    pub(super) passes_within: Duration,
}

impl From<Failure> for Unfit {
    fn from(failure: Failure) -> Unfit {
        Unfit { failure, passes_within: Duration::ZERO }
    }
}

/// Finds the primary, and checks that it accepts the replica's server and that it is the right one.
pub(super) async fn primary(
    options: &Options,
    server: &Server,
    target: &Target,
    plan: &Offer,
    known: &Known,
) -> Result<Primary, Unfit> {
    let may_pass = if known.finding.is_some() { FAIL_OVER_LIMIT } else { Duration::ZERO };
    if plan.run_id == target.facts.run_id.clone().unwrap_or_default() && !plan.run_id.is_empty() {
        return Err(Failure::refused(format!(
            "the server {} is the very server that the source takes its snapshot of; name another with --server",
            server.url()
        ))
        .into());
    }
    let HostPort { host, port } = match &known.finding {
        Some(finding) => finding.ask().await?,
        None if plan.primary.host.is_empty() => {
            HostPort { host: source_host(options, known.source), port: plan.primary.port }
        }
        None => HostPort { host: plan.primary.host.clone(), port: plan.primary.port },
    };
    let trust = known.primaries.trust(&host, port).map_err(Failure::refused)?;
    // Before the connection, which would send the password.
    if let (Trust::NoPassword(why), Some(_)) = (&trust, &target.login.password) {
        return Err(Failure::refused(why.clone()).into());
    }
    let refused = |error: ServerError| Unfit {
        failure: no_entry(&error, server.url(), (&host, port, plan.primary.tls), target),
        passes_within: if error.is_passing() { may_pass } else { Duration::ZERO },
    };
    let primary_server = as_the_server_would(options, target, &host, port)?;
    let mut client = primary_server.connect().await.map_err(refused)?;
    let mut is_asked = known.finding.is_some();
    let (mut told, mut has_modules) = (None, false);
    match Facts::read(&mut client).await {
        Ok(facts) => {
            let identity = check_identity(&facts, target, plan, &host, port);
            // A server that is just being started does not have its history yet.
            let is_loading = facts.loading == Some(true);
            identity.map_err(|failure| match is_loading {
                true => {
                    let text = format!("the primary {host}:{port} is loading its data set (-LOADING)");
                    Unfit::from(Failure::passing(Code::Server, text))
                }
                // A replica that the source captures has its new primary's address before it has its history.
                false => {
                    let is_beside_a_replica = facts.run_id.as_deref() != Some(plan.run_id.as_str());
                    let settles = if is_beside_a_replica { SETTLE_LIMIT } else { Duration::ZERO };
                    Unfit { failure, passes_within: may_pass.max(settles) }
                }
            })?;
            has_modules = !facts.modules_missing_at(&Facts::default()).is_empty();
            check_format(&facts, target, server.url())?;
            check_contents(&facts, target, server.url())?;
            let has = client.config_number("databases").await.map_err(refused)?;
            check_later_databases(has, target, server.url())?;
            if let Some(conversion) = &target.conversion {
                let ran = client.info("commandstats").await.map_err(refused)?;
                conversion.check_commands(&ran, &facts, server.url())?;
            }
            if facts.run_id.as_deref() != Some(plan.run_id.as_str()) {
                is_asked = true;
            }
            told = Some(facts);
        }
        Err(ServerError::Refused { kind: RefusalKind::NoPerm, .. }) => {
            tracing::info!(
                "the primary {host}:{port} lets the replica in but doesn't tell it about itself (INFO): not compared"
            );
            client.command(&["PING"]).await.map_err(refused)?;
        }
        Err(error) => return Err(refused(error)),
    }
    let (finding, known) = (known.finding.clone(), known.primaries.clone());
    let compared = Instant::now();
    let (server, raise_to, facts) = (primary_server, None, told);
    Ok(Primary { host, port, is_asked, trust, finding, raise_to, facts, has_modules, known, server, compared })
}

/// Refuses a server that has no configuration file, or may not be told to write it, if it is to be written.
pub(super) async fn refuse_without_a_file(client: &mut Client) -> Result<(), Failure> {
    let info = client.info("server").await?;
    refuse_without_rewriting(client, &Facts::from_info(&info)).await?;
    match info.get("config_file") {
        Some("") => Err(Failure::refused(format!(
            "the server {} was started without a configuration file, so --rewrite-config cannot write one: start it with a file, \
             or omit the option",
            client.server().url()
        ))),
        _ => Ok(()),
    }
}

/// Refuses a sync that Sentinel would undo before its end.
pub(super) async fn refuse_what_sentinel_undoes(
    options: &Options,
    server: &Server,
    target: &Target,
    primary: &mut Primary,
) -> Result<(), Failure> {
    let Some(finding) = &primary.finding else { return Ok(()) };
    let (sentinels, url) = (finding.sentinels(), server.url());
    let Some(known) = sentinel::known(sentinels, &target.facts, url).await? else { return Ok(()) };
    let name = sentinels.name();
    if options.stay || options.on_failure == OnFailure::Detached {
        let option = if options.stay { "--stay" } else { "--on-failure detached" };
        return Err(Failure::refused(format!(
            "the server {url} cannot keep to {option}: Sentinel knows it as a replica of {name}, and makes it follow the primary \
             again; omit {option}"
        )));
    }
    let data = primary.data().unwrap_or(u64::MAX >> 20);
    let longest = sentinel::longest(data, options.relay.download_limit);
    match known.is_too_late(longest) {
        false => Ok(()),
        true if options.extend_failover_timeout => {
            primary.raise_to = Some(known.timeout_for(longest));
            Ok(())
        }
        true => Err(Failure::refused(format!("the server {url}: {}", known.refusal(name, data, longest)))),
    }
}

/// The source's host, as this agent reaches it. It stands for the primary's host if the source's server has only a
/// loopback address, which names another host here.
fn source_host(options: &Options, source: SocketAddr) -> String {
    let named = &options.read.source.present().host;
    match named.parse::<IpAddr>() {
        Ok(_) => named.clone(),
        // A name can resolve to another address on the server's host. The address that it led to here cannot.
        Err(_) => source.ip().to_string(),
    }
}

/// The primary, with the credentials and the TLS that the replica's server will use.
fn as_the_server_would(options: &Options, target: &Target, host: &str, port: u16) -> Result<Server, Failure> {
    let bracketed = if host.contains(':') { format!("[{host}]") } else { host.to_string() };
    let scheme = if target.tls_replication { "rediss" } else { "redis" };
    let url: ServerUrl = format!("{scheme}://{bracketed}:{port}").parse().map_err(|error| {
        Failure::refused(format!(
            "the source names the primary by what is no address: {error}; correct --announce at remora source"
        ))
    })?;
    let PrimaryLogin { user, password, .. } = &target.login;
    let user = Some(user.clone()).filter(|user| !user.is_empty() && password.is_some());
    let credentials = Credentials { user, password: password.clone() };
    Ok(Server::new(url, credentials, &tls_options(options, target), Task::Replica)?)
}

/// The value of the command line, or else the server's own.
fn tls_options(options: &Options, target: &Target) -> TlsOptions {
    match target.tls_replication {
        false => TlsOptions::default(),
        true => tls_of(options.server.tls.clone(), target.tls.clone()),
    }
}

/// With which TLS the agent speaks to a primary in the server's place: what is given, or else the server's own.
pub(super) fn tls_of(given: TlsOptions, own: TlsOptions) -> TlsOptions {
    match given.certificate.is_some() {
        true => TlsOptions { ca: given.ca.or(own.ca), ..given },
        false => {
            let TlsOptions { ca, server_name, pins, .. } = given;
            TlsOptions { ca: ca.or(own.ca), server_name, pins, ..own }
        }
    }
}

fn check_identity(facts: &Facts, target: &Target, plan: &Offer, host: &str, port: u16) -> Result<(), Failure> {
    if facts.run_id.is_some() && facts.run_id == target.facts.run_id {
        return Err(Failure::refused(format!(
            "{host}:{port}, where the primary should be, is the replica's own server; give the source the primary's address with \
             --announce"
        )));
    }
    // A server that is promoted begins a history of its own: a primary with that of another server is where it began.
    if target.facts.role == Some(Role::Primary) && facts.replid.is_some() && facts.replid == target.facts.replid {
        return Err(Failure::refused(format!(
            "{host}:{port} follows the replica's own server, directly or through others: if that followed it, no server of theirs would \
             take writes; name the servers the other way round, or another server (to exchange their roles: remora switch)"
        )));
    }
    let same_server = facts.run_id.as_deref() == Some(plan.run_id.as_str());
    let same_history = facts.replid.is_some() && facts.replid == plan.replid;
    if same_server || same_history {
        return Ok(());
    }
    Err(Failure::refused(format!(
        "{host}:{port} is not the primary that the source captures ({}): another history ({}); give the source the right address \
         with --announce",
        plan.primary.source_sees_as,
        facts.replid.map_or_else(|| "none told".to_string(), |replid| replid.to_string())
    )))
}

/// The primary would refuse the replica's server, or does so now.
fn no_entry(
    error: &ServerError,
    replica: &ServerUrl,
    (host, port, tls): (&str, u16, bool),
    target: &Target,
) -> Failure {
    // A plain port waits for the rest of a TLS handshake as if it were a command.
    let is_away =
        matches!(error, ServerError::Unreachable { cause, .. } if cause.kind() != std::io::ErrorKind::TimedOut);
    let speaks_otherwise = !is_away && (tls || target.tls_replication);
    let passes = error.is_passing() && (error.refusal().is_some() || !speaks_otherwise);
    let is_refused = matches!(error.refusal(), Some(RefusalKind::NoAuth | RefusalKind::WrongPass));
    let is_of_a_link = target.login.password.as_ref().is_some_and(may_be_a_secret);
    let text = match error.refusal() {
        _ if is_of_a_link && (is_refused || says_that_there_is_no_password(error)) => format!(
            "the primary {host}:{port} does not know masterauth of the server {replica}, which looks like the secret of another remora replica's \
             link. If one works on that server, wait until it has ended, or stop it; if it was killed, start it again in the same way \
             (the same --state-dir): it puts the server's own masterauth back. Only if there was none, set the right one there"
        ),
        _ if says_that_there_is_no_password(error) => format!(
            "the primary {host}:{port} has no password, and refuses the server {replica} for ever as long as that one gives it one: \
             clear masterauth there"
        ),
        Some(RefusalKind::NoAuth) if target.login.password.is_none() => format!(
            "the primary {host}:{port} wants a password and the server {replica} has none to give: set masterauth (and masteruser, \
             where the primary has named users) on {replica}"
        ),
        Some(RefusalKind::NoAuth | RefusalKind::WrongPass) => format!(
            "the primary {host}:{port} does not accept masterauth{} of the server {replica}: set the right one there",
            match &*target.login.user {
                [] => String::new(),
                user => format!(" of masteruser {}", user.escape_ascii()),
            }
        ),
        Some(RefusalKind::NoPerm) => format!(
            "the primary {host}:{port} does not permit the user of {replica} what a replica needs (+psync +replconf +ping): {error}"
        ),
        Some(_) => format!("the primary {host}:{port} would not take the server {replica}: {error}"),
        None if tls && !target.tls_replication && !is_away => format!(
            "the source knows the primary by its TLS port {host}:{port}, to which the server {replica} would speak plainly \
             (tls-replication no): {error}; set tls-replication yes there, or give the source the primary's plain port with --announce"
        ),
        None if target.tls_replication && !is_away => format!(
            "the server {replica} speaks only TLS to its primary (tls-replication yes), and {host}:{port} can't be spoken to so: \
             {error}; if that is the primary's plain port, give the source its tls-port with --announce"
        ),
        None => format!(
            "the primary can't be reached as {host}:{port} from here, so the server {replica} could not follow it: {error}; give the \
             source an address that replicas can use with --announce"
        ),
    };
    if passes { Failure::passing(Code::Server, text) } else { Failure::refused(text) }
}

/// The servers report it by this text, without an error code.
fn says_that_there_is_no_password(error: &ServerError) -> bool {
    matches!(error, ServerError::Refused { text, .. } if text.contains("without any password configured"))
}

// [`Target`]: what is known of the replica's server before a sync.

/// Facts about the replica's server.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) facts: Facts,
    /// How it logs in to its primary.
    pub(super) login: PrimaryLogin,
    /// How it logs in at our link.
    pub(super) link_login: LinkLogin,
    /// Whether it requires TLS to its primary, and so at the link.
    pub(super) tls_replication: bool,
    /// The certificates that it then uses, as far as the agent can read them.
    pub(super) tls: TlsOptions,
    /// The value of `repl-diskless-load`.
    pub(super) diskless_load: Option<String>,
    /// The number of databases (`databases`).
    pub(super) databases: Option<u32>,
    /// Whether it tries to load snapshots of formats that it does not know (`rdb-version-check relaxed`).
    pub(super) reads_newer: bool,
    /// What the snapshot is converted to; `None`: it gets the primary's own.
    pub(super) conversion: Option<Conversion>,
    /// Whether it follows the link of a killed agent. What it holds is then the rest of an unfinished sync.
    pub(super) unfinished: bool,
}

impl Target {
    /// What the source is told of the server: its name and version, and whether the snapshot is converted for it.
    pub(super) fn name(&self) -> String {
        let name = self.facts.name();
        if self.conversion.is_some() { name + CONVERTED } else { name }
    }

    /// The primary that the server followed before the sync.
    pub(super) fn followed(&self, record: &Record) -> Option<(String, u16)> {
        match &self.facts.link {
            _ if self.unfinished => record.former(),
            link => link.as_ref().map(|link| (link.host.clone(), link.port)),
        }
    }
}

// Contents: whether a server can load, and then hold, what a primary holds.

/// Refuses a server that cannot read the snapshot: it would find out only after it has discarded its own data.
pub(super) fn check_format(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    match facts.unreadable_for(&target.facts) {
        None => Ok(()),
        Some(_) if target.conversion.is_some() => Ok(()),
        Some(why) if target.reads_newer => {
            tracing::warn!(
                "the server {url} may not load this primary's snapshots: {why}; it is told to try (rdb-version-check relaxed), and \
                 loses its own data if it cannot"
            );
            Ok(())
        }
        Some(why) => Err(Failure::refused(format!(
            "the server {url} can't be a replica of this primary: {why}; run a server there that is as new as the primary, of the same \
             kind, or give --convert (docs/how-to/migrate.md)"
        ))),
    }
}

/// Refuses a server that cannot hold what the primary holds.
pub(super) fn check_contents(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    check_databases(facts, target, url)?;
    if let Some(conversion) = &target.conversion {
        // The converter finds keys of modules, wherever there are some: servers have modules that no key is of.
        return conversion.check_contents(facts, &target.facts, url);
    }
    check_modules(facts, target, url)?;
    check_field_ttls(facts, &target.facts, url, target.facts.holds_field_ttls_of(facts))
}

/// Refuses a server that has fewer databases than the primary uses. A server that loads a key of a database that it
/// lacks ends its process, after its own data were removed.
fn check_databases(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    match (facts.highest_database(), target.databases) {
        (Some(highest), Some(count)) if highest >= count => Err(Failure::refused(format!(
            "the server {url} has {}, and the primary holds keys in database {highest}: start the server with databases \
             {} or more",
            counted(count, "database"),
            highest + 1
        ))),
        _ => Ok(()),
    }
}

/// Refuses a server that has fewer databases than the primary, whatever these hold now. It cannot select one that it
/// lacks, and carries out in another one what clients write there: a `FLUSHDB` too.
fn check_later_databases(primary: Option<u32>, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    match (primary, target.databases) {
        (Some(has), Some(count)) if has > count && target.facts.cluster_enabled != Some(true) => {
            Err(Failure::refused(format!(
                "the server {url} has {}, and the primary has {has}: what clients write to one that the server lacks would be carried \
                 out in another one there; start the server with databases {has}",
                counted(count, "database")
            )))
        }
        _ => Ok(()),
    }
}

/// Refuses a server that lacks a module of the primary, for the same reason.
fn check_modules(facts: &Facts, target: &Target, url: &ServerUrl) -> Result<(), Failure> {
    match facts.modules_missing_at(&target.facts).as_slice() {
        [] => Ok(()),
        missing => Err(Failure::refused(format!(
            "the server {url} lacks modules that the primary has loaded: {}; a snapshot with their data would end the server: load them \
             there",
            missing.join(", ")
        ))),
    }
}

// Needs: the commands by which a sync changes the replica's server, and whether the server would carry them out.
//
// They are asked for before the first change, by a dry run and by a sync alike. A server can lack one because its ACL
// forbids it to our user, or because it was renamed. [`remora_server::facts`] says how it is asked.

/// A command, and what a sync without it is.
struct Need {
    needed: Needed,
    /// Whether a sync with these options sends it.
    is_sent: fn(&Options) -> bool,
    /// What happens without it; `None`: there is no sync without it.
    without: Option<&'static str>,
}

/// Points the server at the link and at the primary, and detaches it.
pub(super) const FOLLOW: &str = "REPLICAOF";

/// Removes its keys.
pub(super) const EMPTY: &str = "FLUSHALL";

/// Ends its connection to its primary.
pub(super) const CUT: [&str; 4] = ["CLIENT", "KILL", "TYPE", "master"];

/// Writes its configuration file.
pub(super) use crate::record::REWRITE;

/// Those of each sync by the link, but `CONFIG SET`, for which [`remora_delivery::link::candidates`] asks because it
/// can do without.
const NEEDS: [Need; 2] = [
    Need {
        needed: Needed {
            command: &[FOLLOW, "NO", "ONE"],
            refused_by_itself: &[FOLLOW, "remora", "remora"],
            since: ALWAYS,
        },
        is_sent: |_| true,
        without: None,
    },
    Need {
        needed: Needed { command: &[EMPTY], refused_by_itself: &[EMPTY, "remora"], since: ALWAYS },
        is_sent: |options| options.on_failure == OnFailure::Empty,
        without: Some("a sync that fails in its middle leaves a part of the data set there (--on-failure empty)"),
    },
];

const WRITE_THE_FILE: Needed = Needed { command: &REWRITE, refused_by_itself: &[], since: ALWAYS };

const CUT_THE_LINK: Needed =
    Needed { command: &CUT, refused_by_itself: &["CLIENT", "KILL", "ID", "remora"], since: ALWAYS };

/// Any setting stands for `save`, as the servers' rules name the command only.
const SET_SAVES: Needed = Needed {
    command: &["CONFIG", "SET", SAVE, ""],
    refused_by_itself: &["CONFIG", "SET", "remora", "remora"],
    since: ALWAYS,
};

/// Refuses a server that would not carry out a command of the sync, and warns of one that a sync can do without.
pub(super) async fn refuse_what_is_not_permitted(
    options: &Options,
    client: &mut Client,
    target: &Target,
) -> Result<(), Failure> {
    for need in NEEDS.iter().filter(|need| (need.is_sent)(options)) {
        match (need.needed.ask(client, &target.facts).await?, need.without) {
            (Permission::Refused(error), None) => return Err(Failure::from(error).and(UNTOUCHED)),
            (Permission::Refused(error), Some(without)) => tracing::warn!("{without}: {error}"),
            (Permission::Granted | Permission::Unknown, _) => {}
        }
    }
    Ok(())
}

/// Refuses a server whose configuration file is to be written and which does not permit that.
pub(super) async fn refuse_without_rewriting(client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    refuse_without(WRITE_THE_FILE, "--rewrite-config needs +config|rewrite there", client, facts).await
}

/// Refuses a server whose connection to its primary is to be cut and which does not permit that.
pub(super) async fn refuse_without_cutting(client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    refuse_without(CUT_THE_LINK, "--delivery intercept with --replace needs +client|kill there", client, facts).await
}

/// Refuses a server that saves by itself and does not permit that to be turned off (`--delivery file`).
pub(super) async fn refuse_without_turning_saves_off(client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    if client.config_bytes(SAVE).await?.is_none_or(|value| value.is_empty()) {
        return Ok(());
    }
    match SET_SAVES.ask(client, facts).await? {
        Permission::Refused(_) => Err(saves_stay_on(client.server().url())),
        Permission::Granted | Permission::Unknown => Ok(()),
    }
}

/// Why a server that saves by itself gets no file.
pub(super) fn saves_stay_on(url: &ServerUrl) -> Failure {
    Failure::refused(format!(
        "the server {url} does not let its saves be turned off, and would write over the file at its end: grant our user \
         +config|set there"
    ))
}

async fn refuse_without(needed: Needed, advice: &str, client: &mut Client, facts: &Facts) -> Result<(), Failure> {
    match needed.ask(client, facts).await? {
        Permission::Refused(error) => Err(Failure::from(error).and(advice).and(UNTOUCHED)),
        Permission::Granted | Permission::Unknown => Ok(()),
    }
}

/// What a refusal leaves.
const UNTOUCHED: &str = "the server was not touched";

// Reach: whether the primary would have the replica's server, asked from where that connects and as its user.
//
// The preflight connects from an address of the kernel's choice. A server with `bind-source-addr` connects from
// another one, from which a firewall, or the primary's protected mode, may keep it away. And a user that may log in
// need not be one that may replicate.

/// Connects to the primary as the server would. Returns what could not be checked.
///
/// # Errors
/// The primary cannot be reached from there, or does not permit what a replica needs.
pub(super) async fn check(client: &mut Client, target: &Target, primary: &Primary) -> Result<Vec<String>, Failure> {
    let (mut unchecked, url) = (Vec::new(), client.server().url().clone());
    let own = client.config_get("bind-source-addr").await?.filter(|text| !text.is_empty());
    let locality = Locality::of(client, target.facts.process_id);
    let is_here = locality.server.is_none() || locality.uid.is_some();
    let at = format!("{}:{}", primary.host, primary.port);
    let address = own.as_ref().and_then(|text| text.parse::<IpAddr>().ok()).filter(|_| is_here);
    let mut asked = match (address, own) {
        (Some(address), _) => primary.server.connect_from(address).await.map_err(|error| {
            let text = format!(
                "the server {url} connects to its primary from {address} (bind-source-addr), and {at} cannot be used from there: \
                 {error}; correct bind-source-addr, or let the primary accept that address"
            );
            if error.is_passing() { Failure::passing(Code::Server, text) } else { Failure::refused(text) }
        })?,
        (None, own) => {
            unchecked.extend(own.map(|own| format!("whether {at} can be reached from {own}, the server's bind-source-addr")));
            primary.server.connect().await?
        }
    };
    let unknown = Facts::default();
    for needed in TO_REPLICATE {
        match needed.ask(&mut asked, primary.facts.as_ref().unwrap_or(&unknown)).await? {
            Permission::Granted => {}
            Permission::Unknown => {
                unchecked.push(format!("whether {at} permits {} to the server's user", needed.name()));
            }
            Permission::Refused(ServerError::Refused { text, .. }) => {
                return Err(Failure::refused(format!(
                    "the primary {at} does not permit the user of {url} what a replica needs (+psync +replconf +ping): {text}"
                )));
            }
            Permission::Refused(error) => return Err(error.into()),
        }
    }
    Ok(unchecked)
}

// The primary: what is known of it before the source speaks, and the fail-over time that is raised for a sync.

/// What the options say of the primary. `followed`: what the server followed before the sync. `source`: the address by
/// which the source was reached.
pub(super) fn known(options: &Options, followed: Option<(String, u16)>, source: SocketAddr) -> KnownPrimaries {
    KnownPrimaries {
        expected: options.expected_primaries.clone(),
        is_vouched_for: options.is_source_proven || options.sentinels.is_some(),
        source: (options.read.source.present().host.clone(), source.ip()),
        followed,
    }
}

// Raised: the fail-over time of a group, raised at its Sentinels for the time of a sync (`--extend-failover-timeout`).
//
// A Sentinel takes a replica that it knows back after `failover-timeout`. Each does so by itself, so the time is
// raised at all of them or at none. What it was is in the record file before it is changed. It is put back where it
// still is what the agent set, at the end of the sync, or by the next agent for the server.

/// Raises the time at every Sentinel.
///
/// # Errors
/// A Sentinel does not answer, refuses, or knows further ones that are not in the list. It is as before then.
pub(super) async fn raise(record: &mut Record, sentinels: &Sentinels, to: Duration) -> Result<(), Failure> {
    let mut before = Vec::new();
    for server in sentinels.each() {
        let group = sentinels.group_at(server).await?;
        let (listed, known) = (sentinels.each().len() as u64, group.others.saturating_add(1));
        if known > listed {
            return Err(Failure::refused(format!(
                "the Sentinel {} knows {known} Sentinels of {}, and --sentinel names {listed}: --extend-failover-timeout needs all of \
                 them, since each takes the server back by itself",
                server.url(),
                sentinels.name()
            )));
        }
        before.push((server.url().to_string(), millis(group.failover_timeout)));
    }
    let set = millis(to);
    record.note_raised(Some(Raised { name: sentinels.name().to_owned(), set, before }))?;
    for server in sentinels.each() {
        if let Err(error) = sentinels.set_failover_timeout(server, set).await {
            let put_back = put_back(record, Some(sentinels)).await;
            let failure = Failure::from(error);
            return Err(if put_back.is_empty() { failure } else { failure.and(put_back.trim_start_matches("; ")) });
        }
    }
    tracing::warn!(name = sentinels.name(), to = ?to, "failover-timeout is raised at the Sentinels until the sync ends");
    Ok(())
}

/// Puts the time back, if it was raised. The text goes on behind a sentence; it is empty if nothing is left to do.
pub(super) async fn put_back(record: &mut Record, sentinels: Option<&Sentinels>) -> String {
    let Some(raised) = record.raised().cloned() else { return String::new() };
    let mut left = Vec::new();
    for (url, before) in &raised.before {
        let server = sentinels.and_then(|sentinels| {
            let server = sentinels.each().iter().find(|server| server.url().to_string() == *url)?;
            (sentinels.name() == raised.name).then_some((sentinels, server))
        });
        let done = match server {
            None => Err("it is not among --sentinel".to_owned()),
            Some((sentinels, server)) => put_back_at(sentinels, server, raised.set, *before).await,
        };
        if let Err(why) = done {
            left.push(format!("SENTINEL SET {} failover-timeout {before} at {url} ({why})", raised.name));
        }
    }
    if !left.is_empty() {
        return format!("; failover-timeout is still raised: send {}", left.join(", "));
    }
    match record.note_raised(None) {
        Ok(()) => String::new(),
        Err(failure) => format!("; {failure}"),
    }
}

async fn put_back_at(
    sentinels: &Sentinels,
    server: &remora_server::Server,
    set: u64,
    before: u64,
) -> Result<(), String> {
    let present = sentinels.group_at(server).await.map_err(|error| error.to_string())?;
    // Another value is an operator's.
    if millis(present.failover_timeout) == set {
        sentinels.set_failover_timeout(server, before).await.map_err(|error| error.to_string())?;
    }
    Ok(())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use remora_redis::info::Info;

    use super::*;

    fn server(text: &str) -> Facts {
        Facts::from_info(&Info::parse(text.replace(' ', "\n").as_bytes()))
    }

    #[test]
    fn fields_that_expire_are_for_servers_that_can_hold_them() {
        let url: ServerUrl = "redis://h:1".parse().unwrap();
        let redis = |version: &str| server(&format!("redis_version:{version}"));
        let valkey = |version: &str| server(&format!("server_name:valkey valkey_version:{version}"));
        let primary =
            server("server_name:valkey valkey_version:9.1.2 db3:keys=5,expires=0,avg_ttl=0,keys_with_volatile_items=2");
        let newer = server("redis_version:7.4.0 db0:keys=5,expires=0,avg_ttl=0,subexpiry=1");
        let why = |primary: &Facts, target: &Facts| {
            let holds_them = target.holds_field_ttls_of(primary);
            check_field_ttls(primary, target, &url, holds_them).err().map(|failure| failure.message)
        };
        for (primary, target) in [
            (&primary, valkey("8.1.8")),
            (&primary, redis("8.2.0")),
            (&newer, redis("7.2.4")),
            (&newer, valkey("9.1.2")),
        ] {
            let why = why(primary, &target).unwrap();
            assert!(why.contains(&target.name()) && why.contains(&primary.name()), "{why}");
        }
        assert!(why(&primary, &valkey("8.0.1")).unwrap().contains("2 hashes"));
        for (primary, target) in [(&primary, valkey("9.0.0")), (&newer, redis("8.0.0")), (&newer, Facts::default())] {
            assert_eq!(why(primary, &target), None);
        }
        assert_eq!(why(&valkey("9.1.2"), &valkey("8.1.8")), None, "there are none");
    }

    /// A command that is sent and not asked for would be refused in the middle of a sync.
    #[test]
    fn every_command_that_changes_the_server_is_asked_for() {
        let sources = [
            include_str!("control.rs"),
            include_str!("driver/server/mod.rs"),
            include_str!("driver/server/leave.rs"),
            include_str!("attend/once.rs"),
        ];
        // Those that read, and those of the module, without which the sync goes by the link.
        let harmless = ["ROLE", "MULTI", "DISCARD", "EXEC", "REMORA.STATUS"];
        for source in sources {
            let product = source.split("#[cfg(test)]\nmod tests").next().unwrap();
            for sent in product.split("&[\"").skip(1) {
                let name = sent.split('"').next().unwrap();
                let is_command = name.len() > 2 && name.chars().all(|one| one.is_ascii_uppercase() || one == '.');
                assert!(!is_command || harmless.contains(&name), "{name} is not named by a constant of this file");
            }
        }
    }

    #[test]
    fn what_the_server_refuses_by_itself_is_the_same_command() {
        for needed in NEEDS.iter().map(|need| need.needed).chain([CUT_THE_LINK, SET_SAVES]) {
            let (sent, asked) = (needed.command, needed.refused_by_itself);
            assert!(asked.is_empty() || sent[0] == asked[0], "{sent:?}, {asked:?}");
        }
    }
}
