//! Control: the connection by which the agent changes its own server, and the check that the server is still the
//! agent's to change.
//!
//! An operator, Sentinel or a script may promote the server, or point it at another primary, at any moment of a sync.
//! So before each command that changes the server (`REPLICAOF`, `FLUSHALL`, `CONFIG SET`) the agent asks it which
//! primary it follows *now*, and compares the answer with what the agent expects. [`taken_over`] decides, without I/O;
//! [`Control::still_ours`] asks. One round trip lies between the answer and the command ([`Control::follow`]), or the
//! five of a transaction: the servers offer no command that checks and changes in one step. A command whose answer was
//! lost is only sent again after another look.
//!
//! Not here: what is changed and when ([`super::driver`]), and how it is put back ([`super::record`]).

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use remora_redis::ReplId;
use remora_redis::resp::Frame;
use tokio::time::Instant;

use super::preflight::{EMPTY, FOLLOW};
use super::record::Record;
use remora_base::mutation::Mutation;
use remora_process::exit::{Code, Failure};
use remora_process::signals::{CHILD_OF, Signals};
use remora_server::Login;
use remora_server::{Client, Facts, Server, ServerError, Task};

/// How long the stream is held back for the server to come to the end of what it was given: some megabytes in its
/// socket.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// Pause between two looks at a server that settles.
const SETTLE_LOOK: Duration = Duration::from_millis(5);

/// The server and one connection to it. A new connection replaces one that is closed or out of step.
pub(super) struct Control {
    server: Server,
    client: Client,
}

/// Which primary the server must follow for the agent to be allowed to change it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Expected<'a> {
    /// The same as when the agent looked before, in the same run of the server.
    AsFound(&'a Facts),
    /// One of these addresses. The server may have restarted meanwhile, and still follow it.
    OneOf(&'a [(&'a str, u16)]),
    /// No primary, in the run with these facts: the agent itself detached it.
    NoPrimary(&'a Facts),
}

/// Why the server is not the agent's to change.
#[derive(Debug)]
pub(super) enum NotOurs {
    /// Another client has changed it: what that client did, as the end of a sentence that begins with the server.
    TakenOver(String),
    /// Its answer does not show it.
    Unknown(ServerError),
}

impl Control {
    pub(super) fn new(server: Server, client: Client) -> Control {
        Control { server, client }
    }

    pub(super) fn server(&self) -> &Server {
        &self.server
    }

    /// A connection on which a command can be sent: the present one, or a new one if the server has closed it or an
    /// earlier command failed on it.
    pub(super) async fn client(&mut self) -> Result<&mut Client, ServerError> {
        if Mutation::ClosedConnectionKept.is_active() {
            return Ok(&mut self.client);
        }
        if !self.client.is_usable() {
            self.client = self.server.connect().await?;
            tracing::debug!(server = %self.server.url(), "reconnected to the server");
        }
        Ok(&mut self.client)
    }

    /// The present connection, for its addresses only.
    pub(super) fn present(&self) -> &Client {
        &self.client
    }

    /// Uses `client` from now on.
    pub(super) fn replace(&mut self, client: Client) {
        self.client = client;
    }

    /// Sends one command that changes neither what the server follows nor its keys. It is sent once more, on a new
    /// connection, if the connection is lost under it.
    pub(super) async fn command(&mut self, command: &[&str]) -> Result<Frame, ServerError> {
        match self.client().await?.command(command).await {
            Err(ServerError::Lost { .. }) => self.client().await?.command(command).await,
            answered => answered,
        }
    }

    /// Reads the server's facts.
    pub(super) async fn facts(&mut self) -> Result<Facts, ServerError> {
        match Facts::read(self.client().await?).await {
            Err(ServerError::Lost { .. }) => Facts::read(self.client().await?).await,
            read => read,
        }
    }

    /// Reads the server's facts about its replication only, which are needed often.
    pub(super) async fn replication(&mut self) -> Result<Facts, ServerError> {
        Ok(Facts::from_info(&self.client().await?.info("replication").await?))
    }

    /// Waits until the server has executed everything that it received. The stream is held back meanwhile.
    ///
    /// A Redis from 7.4 on blocks its link to the primary while a FLUSHDB or FLUSHALL runs in the background, and a
    /// REPLICAOF at that moment discards the position where it would go on: it would ask the primary for a full copy
    /// (freeClient in networking.c caches no primary that is blocked).
    pub(super) async fn settle(&mut self) -> Result<(), ServerError> {
        let until = Instant::now() + DRAIN_LIMIT;
        let mut before = None;
        while Instant::now() < until {
            tokio::time::sleep(SETTLE_LOOK).await;
            let clients = self.client().await?.info("clients").await?;
            let blocked = clients.number::<u64>("blocked_clients").unwrap_or(0);
            let offset = self.replication().await?.offset;
            // Nothing was carried out since the last look, and in between the link was not blocked: nothing is left.
            if offset == before && blocked == 0 {
                return Ok(());
            }
            before = offset;
        }
        tracing::debug!("the server has clients that are blocked, or is slow; it is handed over as it is");
        Ok(())
    }

    /// Asks the server which primary it follows, and fails unless the answer is as expected.
    pub(super) async fn still_ours(&mut self, expected: Expected<'_>) -> Result<Facts, NotOurs> {
        let facts = self.facts().await?;
        if_ours(&facts, expected)?;
        Ok(facts)
    }

    /// Sends a command that changes the server, on the connection over which the server was just asked whether it is
    /// ours, and never over another one.
    pub(super) async fn command_after_look(&mut self, command: &[&str]) -> Result<Frame, ServerError> {
        self.client.command(command).await
    }

    /// Sends a command that changes the server, if the server is still as expected at this moment, and if `may` agrees
    /// with what it says. Returns what the server was just before; `None` if `may` did not agree.
    ///
    /// If the connection is lost under the command, the server may have carried it out, and other clients may have
    /// changed the server since. So the server is asked once more, over a new connection: nothing is left to do if it
    /// `is_done`, and the command is sent again only to a server that is still as expected.
    async fn change(
        &mut self,
        command: &[&str],
        expected: Expected<'_>,
        may: impl Fn(&Facts) -> bool,
        is_done: impl Fn(&Facts) -> bool,
    ) -> Result<Option<Facts>, NotOurs> {
        let mut before_the_loss = None;
        loop {
            let facts = self.facts().await?;
            if before_the_loss.is_some() && is_done(&facts) {
                return Ok(before_the_loss);
            }
            if_ours(&facts, expected)?;
            if !may(&facts) {
                return Ok(None);
            }
            match self.command_after_look(command).await {
                Ok(_) => return Ok(Some(facts)),
                Err(ServerError::Lost { .. }) if before_the_loss.is_none() => before_the_loss = Some(facts),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Points the server at a primary, if the server is still as expected at this moment. Returns what the server was
    /// just before.
    pub(super) async fn follow(&mut self, primary: (&str, u16), expected: Expected<'_>) -> Result<Facts, NotOurs> {
        Ok(self.point_at(primary, expected, |_| true).await?.unwrap_or_default())
    }

    /// As [`Control::follow`], if `may` agrees with what the server says at this moment. Returns whether it did.
    pub(super) async fn follow_if(
        &mut self,
        primary: (&str, u16),
        expected: Expected<'_>,
        may: impl Fn(&Facts) -> bool,
    ) -> Result<bool, NotOurs> {
        Ok(self.point_at(primary, expected, may).await?.is_some())
    }

    async fn point_at(
        &mut self,
        primary: (&str, u16),
        expected: Expected<'_>,
        may: impl Fn(&Facts) -> bool,
    ) -> Result<Option<Facts>, NotOurs> {
        let port = primary.1.to_string();
        let is_done = |facts: &Facts| followed(facts) == Some(primary);
        self.change(&[FOLLOW, primary.0, &port], expected, may, is_done).await
    }

    /// Detaches the server (`REPLICAOF NO ONE`). Returns what the server was just before.
    ///
    /// If the connection is lost under the command, a server that follows no primary afterwards counts as taken over:
    /// another client may have promoted it just then, and the agent must not go on to remove its keys.
    pub(super) async fn detach(&mut self, expected: Expected<'_>) -> Result<Facts, NotOurs> {
        let before = self.change(&[FOLLOW, "NO", "ONE"], expected, |_| true, |_| false).await?;
        Ok(before.unwrap_or_default())
    }

    /// Removes all keys of the server.
    pub(super) async fn empty(&mut self, expected: Expected<'_>) -> Result<(), NotOurs> {
        self.change(&[EMPTY], expected, |_| true, |_| false).await.map(drop)
    }

    /// Points the server at `link` and makes its replication position worthless on the way. Returns the replication
    /// id that the server holds afterwards, which no primary knows.
    ///
    /// A server that leaves its primary caches its position (replid and offset) and shows it to the next one, also
    /// after its keys were removed: a primary whose backlog covers that offset would then continue an empty server
    /// (`+CONTINUE`). `REPLICAOF NO ONE` drops the cached position and gives the server a new id
    /// (replicationUnsetMaster in replication.c); the `REPLICAOF` before it is there for a server that is a primary, to
    /// which `NO ONE` alone does nothing. In one transaction, so that no client writes in between.
    pub(super) async fn follow_from_nothing(&mut self, link: (&str, u16)) -> Result<ReplId, ServerError> {
        let port = link.1.to_string();
        let follow = [FOLLOW, link.0, port.as_str()];
        // The connection of the look that the caller has just taken.
        let client = &mut self.client;
        // Alone first: were MULTI refused in a pipeline, the commands behind it would be carried out one by one.
        client.command(&["MULTI"]).await?;
        for command in [&follow, &[FOLLOW, "NO", "ONE"], &follow] {
            // A command that cannot be queued makes EXEC fail, and nothing is carried out.
            match client.command(command).await {
                Ok(_) => {}
                Err(error @ ServerError::Refused { .. }) => {
                    client.command(&["DISCARD"]).await?;
                    return Err(error);
                }
                Err(error) => return Err(error),
            }
        }
        match client.command(&["EXEC"]).await? {
            Frame::Array(answers) => {
                for answer in answers {
                    if let Frame::Error(text) = answer {
                        return Err(client.refused(FOLLOW, &text));
                    }
                }
            }
            other => return Err(client.unexpected("EXEC", &other)),
        }
        let facts = self.replication().await?;
        match facts.replid {
            Some(replid) => Ok(replid),
            None => Err(self.client.unexpected("INFO", &Frame::Null)),
        }
    }
}

impl From<ServerError> for NotOurs {
    fn from(error: ServerError) -> Self {
        NotOurs::Unknown(error)
    }
}

/// Fails unless the server with these facts is as expected.
fn if_ours(facts: &Facts, expected: Expected<'_>) -> Result<(), NotOurs> {
    if Mutation::NoLook.is_active() {
        return Ok(());
    }
    match taken_over(facts, expected) {
        None => Ok(()),
        Some(how) => Err(NotOurs::TakenOver(how)),
    }
}

/// The primary that the server follows.
fn followed(facts: &Facts) -> Option<(&str, u16)> {
    facts.link.as_ref().map(|link| (link.host.as_str(), link.port))
}

/// What another client did to the server, if it no longer follows the expected primary.
pub(super) fn taken_over(facts: &Facts, expected: Expected<'_>) -> Option<String> {
    let follows = followed(facts);
    let (as_expected, before) = match expected {
        Expected::AsFound(found) => {
            let same = follows == followed(found);
            (same && facts.run_id == found.run_id, Some(found))
        }
        Expected::OneOf(addresses) => (follows.is_some_and(|address| addresses.contains(&address)), None),
        Expected::NoPrimary(found) => (follows.is_none() && facts.run_id == found.run_id, Some(found)),
    };
    if as_expected {
        return None;
    }
    let restarted = before.is_some_and(|before| before.run_id != facts.run_id);
    Some(match follows {
        Some((host, port)) if !restarted => format!("was told to follow {host}:{port} meanwhile"),
        Some((host, port)) => format!("restarted meanwhile and follows {host}:{port}"),
        None if !restarted => "was detached meanwhile (REPLICAOF NO ONE)".to_string(),
        None => "restarted meanwhile and follows no primary".to_string(),
    })
}

// Guard: a process of this program that outlives a killed agent, and gives its server the login to its primary back.
//
// ```text
//   agent ── starts ──▶ guard: reads a pipe, and nothing else
//   agent ends: the pipe ends ──▶ the record names no login ─────────────────────────▶ ends
//                                 the server has no password of its own ─────────────▶ puts masterauth back, ends
//                                 it has one, and still follows the link that is gone ▶ looks again, each second
//                                 it follows another server ─────────────────────────▶ puts masterauth back, ends
//                                 the record is locked, for a minute ────────────────▶ ends: another agent works on it
// ```
//
// The pipe ends before the agent's last lock does: the kernel closes a killed process's files one by one, and may free
// gigabytes of memory between two of them. So a lock alone does not tell that another agent works on the server.
//
// While a server follows the link, its `masterauth` is the [link's secret](super::link::candidates). An agent that is
// killed leaves it there, and then the server can follow no primary: each refuses the login. The next agent puts the
// setting back; without one, the guard does. A password of the server's own stays away from the link's address, where
// any process may listen by now.
//
// Only this setting is put back. A server that holds half a data set must not save it over its file. Decision 25 says
// why this is a process.

/// The variable by which the agent's program knows that it is to be the guard. Its value is the agent's process id.
const VARIABLE: &str = "REMORA_GUARD_OF";

/// The guard's name in a list of processes.
const NAME: &str = "remora-guard";

/// Variables that are for the agent only: of the service manager, and of a command that has started the agent. The
/// guard must outlive that one too.
const OF_THE_AGENT: [&str; 5] = ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", CHILD_OF];

/// Pause between two looks at the server.
const PACE: Duration = Duration::from_secs(1);

/// How long the guard looks for a server that does not answer. One that comes back later has restarted, and has the
/// password of its configuration.
const SILENCE_LIMIT: Duration = Duration::from_secs(120);

/// How long the guard waits for someone to point the server at another primary. Longer than a night.
const WATCH_LIMIT: Duration = Duration::from_secs(24 * 60 * 60);

/// How long the record is locked before the guard takes it for another agent's. A killed agent holds its lock until the
/// kernel has closed its files, which can free a hundred gigabytes first.
const LOCK_LIMIT: Duration = Duration::from_secs(60);

/// Set where this process is the command `remora replica`, so that its arguments are a guard's. A test that runs an
/// agent is not.
static IS_COMMAND: AtomicBool = AtomicBool::new(false);

/// Notes that this process is the command `remora replica`.
pub fn this_is_the_command() {
    IS_COMMAND.store(true, Ordering::Relaxed);
}

/// The agent's end of the pipe. The guard acts when it is closed: by its drop, or by the agent's end.
pub(super) struct Guard(#[allow(dead_code)] Child); // held for its pipe

impl Guard {
    /// Starts a guard with this process's own arguments. `None` if the system starts none: the next agent puts the
    /// setting back.
    pub(super) fn start() -> Option<Guard> {
        if !IS_COMMAND.load(Ordering::Relaxed) {
            return None;
        }
        let mut command = Command::new("/proc/self/exe");
        command.arg0(NAME).args(std::env::args_os().skip(1)).env(VARIABLE, std::process::id().to_string());
        OF_THE_AGENT.iter().for_each(|name| _ = command.env_remove(name));
        // A signal to the agent's group is not for the guard. Who reads the agent's output waits for the agent only.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        match command.spawn() {
            Ok(child) => Some(Guard(child)),
            Err(error) => {
                tracing::debug!(%error, "no guard for the server's masterauth could be started");
                None
            }
        }
    }
}

/// Whether this process was started as a guard.
pub fn is_guard() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// What a look has found.
enum Found {
    /// Nothing is left to do.
    Done,
    /// The server still follows the link, and has a password of its own.
    AtTheLink,
    /// The killed agent still holds the record, or another agent does.
    Locked,
}

/// Runs a guard of an agent at this server, with its state folder, to its end.
///
/// # Errors
/// Signals cannot be caught.
pub async fn run_guard(server: &Login, state_dir: Option<&Path>) -> Result<(), Failure> {
    let mut signals = Signals::catch()?;
    let mut ended = tokio::task::spawn_blocking(|| {
        // Nothing is ever written to the pipe.
        let _ = std::io::stdin().read(&mut [0]);
    });
    loop {
        tokio::select! {
            _ = &mut ended => break,
            _ = signals.next() => {} // the agent was asked to stop, and may not live to do it
        }
    }
    let began = Instant::now();
    let (mut answered, mut unlocked) = (began, began);
    while answered.elapsed() < SILENCE_LIMIT && unlocked.elapsed() < LOCK_LIMIT && began.elapsed() < WATCH_LIMIT {
        match look(server, state_dir).await {
            Ok(Found::Done) => return Ok(()),
            Ok(Found::AtTheLink) => (answered, unlocked) = (Instant::now(), Instant::now()),
            Ok(Found::Locked) => answered = Instant::now(),
            Err(failure) => {
                unlocked = Instant::now();
                tracing::debug!("{failure}");
            }
        }
        tokio::select! {
            () = tokio::time::sleep(PACE) => {}
            _ = signals.next() => return Ok(()),
        }
    }
    Ok(())
}

async fn look(login: &Login, state_dir: Option<&Path>) -> Result<Found, Failure> {
    let server = login.open(Task::Replica)?;
    let url = server.url().to_string();
    let record = Record::open(state_dir, &url)?;
    if !record.has_login() {
        return Ok(Found::Done);
    }
    let mut client = server.connect().await?;
    let facts = Facts::read(&mut client).await?;
    let is_at_the_link = facts.link.as_ref().is_some_and(|link| record.is_our_link(&link.host, link.port));
    if is_at_the_link && record.has_password() {
        return Ok(Found::AtTheLink);
    }
    let mut record = match Record::claim(state_dir, &url) {
        Ok(record) => record,
        Err(failure) if failure.code == Code::Refused => return Ok(Found::Locked),
        Err(failure) => return Err(failure),
    };
    record.put_the_login_back(&mut client).await?;
    // The file stays for the next agent: it also says which primary the server followed before.
    record.save_if_stale();
    Ok(Found::Done)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::{Arc, Mutex};

    use remora_redis::info::Info;
    use remora_redis::resp::{Decoder, Limits};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;
    use remora_server::{Credentials, Task, TlsOptions};

    fn facts(run: &str, follows: Option<(&str, u16)>) -> Facts {
        let role = match follows {
            None => "role:master\r\n".to_string(),
            Some((host, port)) => format!("role:slave\r\nmaster_host:{host}\r\nmaster_port:{port}\r\n"),
        };
        Facts::from_info(&Info::parse(format!("run_id:{run}\r\n{role}").as_bytes()))
    }

    const LINK: (&str, u16) = ("127.0.0.1", 4000);
    const PRIMARY: (&str, u16) = ("10.0.0.1", 6379);

    #[test]
    fn a_server_is_ours_as_long_as_it_follows_whom_it_should() {
        let link = facts("a", Some(LINK));
        assert_eq!(taken_over(&link, Expected::OneOf(&[LINK])), None);
        assert_eq!(taken_over(&facts("b", Some(LINK)), Expected::OneOf(&[LINK])), None, "it restarted and came back");
        assert_eq!(taken_over(&facts("a", Some(PRIMARY)), Expected::OneOf(&[LINK, PRIMARY])), None);
        assert_eq!(taken_over(&link, Expected::AsFound(&link)), None);
        assert_eq!(taken_over(&facts("a", None), Expected::NoPrimary(&link)), None);
    }

    #[test]
    fn a_server_that_another_client_changed_is_not_ours() {
        let link = facts("a", Some(LINK));
        let how = |facts: &Facts, expected| taken_over(facts, expected).unwrap_or_default();
        let promoted = facts("a", None);
        assert_eq!(how(&promoted, Expected::OneOf(&[LINK])), "was detached meanwhile (REPLICAOF NO ONE)");
        assert_eq!(how(&promoted, Expected::AsFound(&link)), "was detached meanwhile (REPLICAOF NO ONE)");
        let moved = facts("a", Some(("10.0.0.9", 6379)));
        for expected in [Expected::OneOf(&[LINK, PRIMARY]), Expected::AsFound(&link), Expected::NoPrimary(&link)] {
            assert_eq!(how(&moved, expected), "was told to follow 10.0.0.9:6379 meanwhile");
        }
        assert_eq!(
            how(&facts("b", Some(LINK)), Expected::AsFound(&link)),
            "restarted meanwhile and follows 127.0.0.1:4000"
        );
    }

    #[test]
    fn a_server_that_restarted_after_it_was_detached_may_hold_other_data_and_is_not_ours() {
        let link = facts("a", Some(LINK));
        let restarted = facts("b", None);
        assert_eq!(
            taken_over(&restarted, Expected::NoPrimary(&link)).as_deref(),
            Some("restarted meanwhile and follows no primary")
        );
    }

    // ---- a connection that is lost under a command ----

    /// What happens at a server when its first command that changes it arrives, besides the loss of the connection.
    #[derive(Clone, Copy)]
    enum Lost {
        /// The server carries it out.
        Answer,
        /// The server does not get it, and from then on follows this.
        Command { then_follows: Option<(&'static str, u16)> },
    }

    /// A server that loses the connection of its first command of a change. Gives back its control connection, and the
    /// changes that it has carried out or was sent.
    async fn losing(follows: Option<(&'static str, u16)>, lost: Lost) -> (Control, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap()).parse().unwrap();
        let sent = Arc::new(Mutex::new(Vec::new()));
        let log = sent.clone();
        tokio::spawn(async move {
            let mut follows = follows.map(|(host, port)| (host.to_string(), port));
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut decoder = Decoder::new(Limits::default());
                let mut bytes = [0; 4096];
                'connection: loop {
                    while let Some(Frame::Array(words)) = decoder.next_frame().unwrap() {
                        let words: Vec<String> = words
                            .into_iter()
                            .map(|word| match word {
                                Frame::Bulk(word) => String::from_utf8(word).unwrap(),
                                other => panic!("{other:?}"),
                            })
                            .collect();
                        let words: Vec<&str> = words.iter().map(String::as_str).collect();
                        let answer = match words.as_slice() {
                            ["PING"] => "+PONG\r\n".to_string(),
                            ["INFO", ..] => {
                                let role = match &follows {
                                    None => "role:master\r\n".to_string(),
                                    Some((host, port)) => {
                                        format!("role:slave\r\nmaster_host:{host}\r\nmaster_port:{port}\r\n")
                                    }
                                };
                                let text = format!("run_id:a\r\n{role}");
                                format!("${}\r\n{text}\r\n", text.len())
                            }
                            ["CONFIG", ..] => "*0\r\n".to_string(),
                            change => {
                                log.lock().unwrap().push(change.join(" "));
                                let is_first = log.lock().unwrap().len() == 1;
                                if let (true, Lost::Command { then_follows }) = (is_first, lost) {
                                    follows = then_follows.map(|(host, port)| (host.to_string(), port));
                                    break 'connection;
                                }
                                match change {
                                    ["REPLICAOF", "NO", "ONE"] => follows = None,
                                    ["REPLICAOF", host, port] => {
                                        follows = Some((host.to_string(), port.parse().unwrap()));
                                    }
                                    _ => {}
                                }
                                if is_first {
                                    break 'connection;
                                }
                                "+OK\r\n".to_string()
                            }
                        };
                        stream.write_all(answer.as_bytes()).await.unwrap();
                    }
                    match stream.read(&mut bytes).await {
                        Ok(0) | Err(_) => break,
                        Ok(count) => decoder.feed(&bytes[..count]),
                    }
                }
            }
        });
        let server = Server::new(url, Credentials::default(), &TlsOptions::default(), Task::Replica).unwrap();
        let client = server.connect().await.unwrap();
        (Control::new(server, client), sent)
    }

    #[tokio::test]
    async fn a_server_that_is_promoted_while_the_connection_is_lost_is_not_told_again() {
        let at_the_link = Expected::OneOf(&[LINK]);
        let lost = Lost::Command { then_follows: None };
        let (mut control, sent) = losing(Some(LINK), lost).await;
        let told = control.follow(PRIMARY, at_the_link).await;
        assert!(matches!(told, Err(NotOurs::TakenOver(how)) if how.contains("was detached meanwhile")));
        assert_eq!(*sent.lock().unwrap(), ["REPLICAOF 10.0.0.1 6379"]);

        // Also where the agent meant to detach it: the keys would be removed next.
        let (mut control, sent) = losing(Some(LINK), lost).await;
        assert!(matches!(control.detach(at_the_link).await, Err(NotOurs::TakenOver(_))));
        assert_eq!(*sent.lock().unwrap(), ["REPLICAOF NO ONE"]);
    }

    #[tokio::test]
    async fn a_server_that_is_pointed_elsewhere_while_the_connection_is_lost_keeps_its_keys() {
        let lost = Lost::Command { then_follows: Some(("10.0.0.9", 6379)) };
        let (mut control, sent) = losing(None, lost).await;
        let emptied = control.empty(Expected::NoPrimary(&facts("a", None))).await;
        assert!(matches!(emptied, Err(NotOurs::TakenOver(how)) if how == "was told to follow 10.0.0.9:6379 meanwhile"));
        assert_eq!(*sent.lock().unwrap(), ["FLUSHALL"]);
    }

    #[tokio::test]
    async fn a_command_is_sent_again_to_a_server_that_is_still_as_expected() {
        let (mut control, sent) = losing(Some(LINK), Lost::Command { then_follows: Some(LINK) }).await;
        control.follow(PRIMARY, Expected::OneOf(&[LINK])).await.unwrap();
        assert_eq!(*sent.lock().unwrap(), ["REPLICAOF 10.0.0.1 6379"; 2]);
        let (mut control, sent) = losing(None, Lost::Command { then_follows: None }).await;
        control.empty(Expected::NoPrimary(&facts("a", None))).await.unwrap();
        assert_eq!(*sent.lock().unwrap(), ["FLUSHALL"; 2]);
    }

    #[tokio::test]
    async fn a_command_whose_answer_alone_was_lost_is_not_sent_again() {
        let (mut control, sent) = losing(Some(LINK), Lost::Answer).await;
        control.follow(PRIMARY, Expected::OneOf(&[LINK])).await.unwrap();
        assert_eq!(*sent.lock().unwrap(), ["REPLICAOF 10.0.0.1 6379"]);
    }
}
