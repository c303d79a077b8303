//! Link login: the password with which the replica's server logs in at the link.
//!
//! Who is on the link receives the whole data set. So the link requires a password that opens nothing else: a secret of
//! this sync. The agent sets it as the server's `masterauth` before `REPLICAOF`. The server's own password for its
//! primary never reaches the link. If the agent is killed, a process that takes over the link's port learns only the
//! secret. The [record](super::record) restores `masterauth` before the server follows its primary, when it is
//! detached, and after a crash.
//!
//! If the server refuses `CONFIG SET`, it keeps its `masterauth`, and the link requires that password.

use remora_redis::psync::server::Access;

use super::once_settled;
use super::record::{Record, present};
use crate::exit::Failure;
use crate::server::{Client, Password, RefusalKind, Server, ServerError};

/// The password with which the replica's server logs in at the link.
#[derive(Clone, Debug)]
pub(super) enum LinkLogin {
    /// A secret of this sync, and the setting that gives it to the server.
    Secret {
        /// The setting's name on this server: `masterauth`, or Valkey's `primaryauth`.
        setting: &'static str,
        secret: Password,
    },
    /// The server's own password for its primary.
    Own { user: Option<Vec<u8>>, password: Password },
}

/// The server's settings for the login to its primary.
#[derive(Clone, Debug)]
pub(super) struct PrimaryLogin {
    /// `masteruser`; empty for the default user.
    pub(super) user: Vec<u8>,
    /// `masterauth`; `None` if the server sends no password.
    pub(super) password: Option<Password>,
    /// The name of the setting with the password; `None` if the server knows no such setting.
    pub(super) setting: Option<&'static str>,
}

/// Random bytes in a secret. A token has 32 too.
const SECRET_BYTES: usize = 32;

/// A setting that no server has. `CONFIG SET` of it changes nothing, and the error shows whether `CONFIG SET` is
/// permitted.
const NO_SETTING: &str = "remora-no-such-setting";

impl LinkLogin {
    /// Finds out which login the server permits. Changes nothing on the server.
    ///
    /// # Errors
    /// A refusal if the server permits no `CONFIG SET` and has no `masterauth`.
    pub(super) async fn choose(
        server: &Server,
        client: &mut Client,
        login: &PrimaryLogin,
    ) -> Result<LinkLogin, Failure> {
        let refused = match once_settled(client, &["CONFIG", "SET", NO_SETTING, "0"]).await {
            Err(error) if matches!(error.refusal(), Some(RefusalKind::NoPerm | RefusalKind::Unknown)) => Some(error),
            Ok(_) | Err(ServerError::Refused { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        match (refused, login.setting, &login.password) {
            (None, Some(setting), _) => Ok(LinkLogin::Secret { setting, secret: random_secret()? }),
            (_, _, Some(password)) => {
                tracing::warn!(
                    "the server {} can't be given a password for the time of the sync: the link asks for its own masterauth",
                    server.url()
                );
                let user = Some(login.user.clone()).filter(|user| !user.is_empty());
                Ok(LinkLogin::Own { user, password: password.clone() })
            }
            (refused, _, None) => {
                let why = refused.map_or_else(|| "it knows no masterauth".to_string(), |error| error.to_string());
                Err(Failure::refused(format!(
                    "the server {} would log in at our link without a password, and other processes could do the same: it has no \
                     masterauth, and it can't be given one for the time of the sync ({why}); grant our user +config|set there, or \
                     set masterauth",
                    server.url()
                )))
            }
        }
    }

    /// The login that the link requires.
    pub(super) fn access(&self) -> Access {
        match self {
            LinkLogin::Secret { secret, .. } => Access::Secret(String::from_utf8_lossy(secret.expose()).into_owned()),
            LinkLogin::Own { user, password } => {
                Access::User { name: user.clone(), password: password.expose().to_vec() }
            }
        }
    }

    /// Sets the server's `masterauth` to the secret. Call it before each `REPLICAOF` to the link.
    pub(super) async fn give(&self, record: &mut Record, client: &mut Client) -> Result<(), Failure> {
        let LinkLogin::Secret { setting, secret } = self else { return Ok(()) };
        let present = present(client, setting).await?.unwrap_or_default();
        if present == secret.expose() {
            return Ok(());
        }
        let before = record.original(setting, &present);
        match record.change(client, setting, &before, secret.expose()).await? {
            true => Ok(()),
            false => Err(Failure::refused(format!(
                "the server {} does not let its {setting} be set, which our link needs for the time of the sync: grant our user \
                 +config|set there",
                client.server().url()
            ))),
        }
    }
}

/// Whether this password may be the secret of another sync's link.
pub(super) fn may_be_a_secret(password: &Password) -> bool {
    let bytes = password.expose();
    bytes.len() == 2 * SECRET_BYTES && bytes.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn random_secret() -> Result<Password, Failure> {
    let mut random = [0; SECRET_BYTES];
    getrandom::fill(&mut random)
        .map_err(|error| Failure::local(format!("the system gives no random bytes: {error}")))?;
    Ok(Password::new(random.iter().map(|byte| format!("{byte:02x}")).collect::<String>()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn every_sync_has_another_secret_which_does_not_show_itself() {
        let [one, other] = [random_secret().unwrap(), random_secret().unwrap()];
        assert_ne!(one, other);
        assert_eq!(one.expose().len(), 2 * SECRET_BYTES);
        assert!(one.expose().iter().all(u8::is_ascii_hexdigit));
        let login = LinkLogin::Secret { setting: "masterauth", secret: one.clone() };
        let text = String::from_utf8(one.expose().to_vec()).unwrap();
        assert!(!format!("{login:?} {:?}", login.access()).contains(&text));
        assert_eq!(login.access(), Access::Secret(text));
    }

    #[test]
    fn without_a_secret_the_link_asks_for_the_servers_own_login() {
        let login = LinkLogin::Own { user: Some("repl".into()), password: Password::new("pw") };
        assert_eq!(login.access(), Access::User { name: Some("repl".into()), password: "pw".into() });
    }
}
