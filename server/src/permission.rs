//! Permission: whether a server would carry out a command for our user, asked without carrying it out; and the ACL
//! rules that allow the commands of each task.
//!
//! ```text
//!   the default user: ACL DRYRUN default <command>          Redis since 7.0, and Valkey
//!      └─ not permitted, or not there ──▶ the command with arguments that it refuses by itself ◀── another user
//!                                            └─ there are none ──▶ ACL DRYRUN, or it is unknown
//! ```
//!
//! A server looks for the command, then counts its arguments, then asks its ACL, and only then looks at what the
//! arguments are. So arguments that are as many as they must be, and make no sense, show the first three. They change
//! nothing, and the server counts an error.

use remora_redis::resp::Frame;

use super::{Client, Facts, RefusalKind, ServerError, Version};

/// A command that a task needs.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    /// The command as the task sends it.
    pub command: &'static [&'static str],
    /// The same with arguments that it refuses by itself; empty if there are none.
    pub refused_by_itself: &'static [&'static str],
    /// The first version of Redis that looks at those arguments before it does anything.
    pub since: Version,
}

/// Any version.
pub const ALWAYS: Version = Version { major: 0, minor: 0, patch: 0 };

/// The user of a connection that has not named one.
const DEFAULT_USER: &[u8] = b"default";

/// The first version of Redis with `ACL DRYRUN`, and with subcommands in its ACL.
const REDIS_7: Version = Version { major: 7, minor: 0, patch: 0 };

/// What a replica sends to its primary. Before 7.0, some versions take an offset that is no number for a wish for a
/// full copy.
pub const TO_REPLICATE: [Needed; 2] = [
    Needed { command: &["REPLCONF", "capa", "eof"], refused_by_itself: &["REPLCONF", "remora"], since: ALWAYS },
    Needed { command: &["PSYNC", "?", "-1"], refused_by_itself: &["PSYNC", "?", "remora"], since: REDIS_7 },
];

/// What a server says of a command.
#[derive(Debug)]
pub enum Permission {
    /// It would carry it out.
    Granted,
    /// It lacks the command, or its ACL forbids it, as the server would answer.
    Refused(ServerError),
    /// The server does not tell.
    Unknown,
}

impl Needed {
    /// The command's name as in messages: `CONFIG REWRITE`, `PSYNC`.
    pub fn name(&self) -> String {
        match self.command {
            [container @ ("CONFIG" | "CLIENT"), subcommand, ..] => format!("{container} {subcommand}"),
            [name, ..] => (*name).to_owned(),
            [] => String::new(),
        }
    }

    /// Asks the server. `facts`: what it says of itself.
    ///
    /// # Errors
    /// The connection failed.
    pub async fn ask(&self, client: &mut Client, facts: &Facts) -> Result<Permission, ServerError> {
        let asks_directly = !self.refused_by_itself.is_empty() && (self.since <= ALWAYS || facts.has_redis(self.since));
        // A user with a name may have the rules that a help page lists, and no more. The server would log a question
        // that it may not ask (ACL LOG), and administrators watch that log.
        let may_ask_the_acl = client.server().credentials().user.is_none() || !asks_directly;
        if facts.has_redis(REDIS_7) && may_ask_the_acl {
            match self.ask_the_acl(client).await? {
                Permission::Unknown => {}
                known => return Ok(known),
            }
        }
        if !asks_directly {
            return Ok(Permission::Unknown);
        }
        match client.command(self.refused_by_itself).await {
            Ok(_) => Ok(Permission::Granted),
            Err(error) => match error.refusal() {
                Some(RefusalKind::NoPerm | RefusalKind::Unknown) => Ok(Permission::Refused(error)),
                Some(_) => Ok(Permission::Granted),
                None => Err(error),
            },
        }
    }

    async fn ask_the_acl(&self, client: &mut Client) -> Result<Permission, ServerError> {
        let user = client.server().credentials().user.clone().unwrap_or_else(|| DEFAULT_USER.to_vec());
        let question = [b"ACL".as_slice(), b"DRYRUN", &user].into_iter();
        let question: Vec<_> = question.chain(self.command.iter().map(|word| word.as_bytes())).collect();
        match client.command(&question).await {
            Ok(Frame::Simple(_)) => Ok(Permission::Granted),
            Ok(Frame::Bulk(why)) => {
                Ok(Permission::Refused(client.refused(&self.name(), &[b"NOPERM ".as_slice(), &why].concat())))
            }
            Ok(_) => Ok(Permission::Unknown),
            Err(ServerError::Refused { text, .. }) if is_not_there(&text) => {
                let text = format!("ERR unknown command '{}'", self.name());
                Ok(Permission::Refused(client.refused(&self.name(), text.as_bytes())))
            }
            Err(error) if error.refusal().is_some() => Ok(Permission::Unknown),
            Err(error) => Err(error),
        }
    }
}

/// Whether `ACL DRYRUN` says that the server has no such command: `ERR Command 'x' not found`.
fn is_not_there(text: &str) -> bool {
    text.starts_with("ERR Command '") && text.contains("not found")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_named_with_its_subcommand() {
        let named = |command| Needed { command, refused_by_itself: &[], since: ALWAYS }.name();
        assert_eq!(named(&["CONFIG", "REWRITE"]), "CONFIG REWRITE");
        assert_eq!(named(&["PSYNC", "?", "-1"]), "PSYNC");
    }

    #[test]
    fn a_missing_command_is_told_from_a_missing_acl() {
        assert!(is_not_there("ERR Command 'REPLICAOF' not found"));
        assert!(!is_not_there("ERR unknown command 'ACL', with args beginning with: 'DRYRUN'"));
        assert!(!is_not_there("ERR User 'x' not found"));
    }
}
