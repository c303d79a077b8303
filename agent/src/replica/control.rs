//! Control: the connection by which the agent changes its own server, and the check that the server is still the
//! agent's to change.
//!
//! An operator, Sentinel or a script may promote the server, or point it at another primary, at any moment of a sync.
//! So before each command that changes the server (`REPLICAOF`, `FLUSHALL`, `CONFIG SET`) the agent asks it which
//! primary it follows *now*, and compares the answer with what the agent expects. [`taken_over`] decides, without I/O;
//! [`Control::still_ours`] asks. One round trip lies between the answer and the command ([`Control::follow`]), or the
//! five of a transaction: the servers offer no command that checks and changes in one step.
//!
//! Not here: what is changed and when ([`super::driver`]), and how it is put back ([`super::record`]).

use remora_redis::ReplId;
use remora_redis::resp::Frame;

#[cfg(any(test, feature = "simulation"))]
use crate::mutation::Mutation;
use crate::server::{Client, Facts, Server, ServerError};

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
        #[cfg(any(test, feature = "simulation"))]
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

    /// Sends one command that does no harm when it is carried out twice: it is sent once more, on a new connection, if
    /// the connection is lost under it.
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

    /// Asks the server which primary it follows, and fails unless the answer is as expected.
    pub(super) async fn still_ours(&mut self, expected: Expected<'_>) -> Result<Facts, NotOurs> {
        let facts = self.facts().await?;
        #[cfg(any(test, feature = "simulation"))]
        if Mutation::NoLook.is_active() {
            return Ok(facts);
        }
        match taken_over(&facts, expected) {
            None => Ok(facts),
            Some(how) => Err(NotOurs::TakenOver(how)),
        }
    }

    /// Points the server at a primary, if the server is still as expected at this moment.
    pub(super) async fn follow(&mut self, primary: (&str, u16), expected: Expected<'_>) -> Result<(), NotOurs> {
        self.follow_if(primary, expected, |_| true).await.map(drop)
    }

    /// As [`Control::follow`], if `may` agrees with what the server says at this moment. Returns whether it did.
    pub(super) async fn follow_if(
        &mut self,
        primary: (&str, u16),
        expected: Expected<'_>,
        may: impl Fn(&Facts) -> bool,
    ) -> Result<bool, NotOurs> {
        let facts = self.still_ours(expected).await?;
        if !may(&facts) {
            return Ok(false);
        }
        self.command(&["REPLICAOF", primary.0, &primary.1.to_string()]).await?;
        Ok(true)
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
        let follow = ["REPLICAOF", link.0, port.as_str()];
        let client = self.client().await?;
        // Alone first: were MULTI refused in a pipeline, the commands behind it would be carried out one by one.
        client.command(&["MULTI"]).await?;
        for command in [&follow, &["REPLICAOF", "NO", "ONE"], &follow] {
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
                        return Err(client.refused("REPLICAOF", &text));
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

/// What another client did to the server, if it no longer follows the expected primary.
pub(super) fn taken_over(facts: &Facts, expected: Expected<'_>) -> Option<String> {
    let follows = facts.link.as_ref().map(|link| (link.host.as_str(), link.port));
    let (as_expected, before) = match expected {
        Expected::AsFound(found) => {
            let same = follows == found.link.as_ref().map(|link| (link.host.as_str(), link.port));
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

#[cfg(test)]
mod tests {
    use remora_redis::info::Info;

    use super::*;

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
}
