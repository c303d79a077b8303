//! Link login: with what the replica's server logs in at our link.
//!
//! The link gives out the whole data set, so it asks for a password, and for one that opens nothing else: a secret of
//! this sync, which the server is given as `masterauth` before it is told to follow the link. The server's own password
//! for its primary never goes to the link, and what listens on the link's port after this agent was killed reads
//! nothing but that secret. The [record](super::record) puts `masterauth` back: before the server is told to follow its
//! primary, when it is detached, and after a crash.
//!
//! A server that refuses `CONFIG SET` keeps its own `masterauth`, and the link asks for that one.

use remora_redis::psync::server::Access;

use super::once_settled;
use super::record::{Record, present};
use crate::exit::Failure;
use crate::server::{Client, Password, RefusalKind, Server, ServerError};

/// See the module's text.
#[derive(Clone, Debug)]
pub(crate) enum LinkLogin {
    /// A secret of this sync, and the setting that gives it to the server.
    Secret {
        /// `masterauth`, or the name that the server has for it.
        setting: &'static str,
        secret: Password,
    },
    /// What the server tells its primary anyway.
    Own { user: Option<String>, password: Password },
}

/// How the server logs in to its primary, as its settings say.
#[derive(Clone, Debug)]
pub(crate) struct PrimaryLogin {
    /// `masteruser`; empty: the default user.
    pub(crate) user: String,
    /// `masterauth`; `None`: it gives no password.
    pub(crate) password: Option<Password>,
    /// The name of the setting with the password; `None` if the server knows no such setting.
    pub(crate) setting: Option<&'static str>,
}

/// Random bytes in a secret: as many as in a token.
const SECRET_BYTES: usize = 32;

/// A setting that no server knows. To set it changes nothing, and the answer tells whether settings may be set.
const NO_SETTING: &str = "remora-no-such-setting";

impl LinkLogin {
    /// Finds out what the server allows, without changing anything there.
    ///
    /// # Errors
    /// A refusal where the server can neither be given a password nor has one.
    pub(crate) async fn choose(
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

    /// What the link asks for.
    pub(crate) fn access(&self) -> Access {
        match self {
            LinkLogin::Secret { secret, .. } => Access::Secret(secret.expose().to_string()),
            LinkLogin::Own { user, password } => {
                Access::User { name: user.clone(), password: password.expose().to_string() }
            }
        }
    }

    /// Gives the server what the link asks for. To be called before each command that makes it follow the link.
    pub(crate) async fn give(&self, record: &mut Record, client: &mut Client) -> Result<(), Failure> {
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
        assert!(one.expose().bytes().all(|byte| byte.is_ascii_hexdigit()));
        let login = LinkLogin::Secret { setting: "masterauth", secret: one.clone() };
        assert!(!format!("{login:?} {:?}", login.access()).contains(one.expose()));
        assert_eq!(login.access(), Access::Secret(one.expose().to_string()));
    }

    #[test]
    fn without_a_secret_the_link_asks_for_the_servers_own_login() {
        let login = LinkLogin::Own { user: Some("repl".into()), password: Password::new("pw") };
        assert_eq!(login.access(), Access::User { name: Some("repl".into()), password: "pw".into() });
    }
}
