//! The tokens that an agent accepts, and what each permits.

use std::path::PathBuf;
use std::sync::Arc;

use remora_messenger::keyring::MAX_KEYS;
use remora_messenger::{Key, Keyring};
use remora_protocol::Message;

use super::Token;
use crate::exit::Failure;

/// What a peer may ask for. It follows from the token that the peer proved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Everything: the peer may become a replica.
    Replica,
    /// The status, and nothing else. No byte of the data set is in it.
    Monitor,
}

impl Role {
    /// Whether a peer with this role may send this message.
    pub(crate) fn may_send(self, message: &Message) -> bool {
        match self {
            Role::Replica => true,
            Role::Monitor => matches!(message, Message::StatusQuery | Message::Leave { .. }),
        }
    }

    fn mark(self) -> u16 {
        match self {
            Role::Replica => 0,
            Role::Monitor => 1,
        }
    }

    /// The role with this mark. A mark of no role permits the least.
    pub(super) fn of_mark(mark: u16) -> Role {
        if mark == Role::Replica.mark() { Role::Replica } else { Role::Monitor }
    }
}

/// The token files of an agent that listens.
pub(crate) struct TokenFiles {
    files: Vec<(PathBuf, Role)>,
    first: Arc<Token>,
    keyring: Arc<Keyring>,
}

impl TokenFiles {
    /// Reads the files: those of replicas, of which the first is the one that this agent proves where it connects, and
    /// those of monitors.
    ///
    /// # Errors
    /// A file cannot be used, two files hold the same token, or there are more than [`MAX_KEYS`].
    pub(crate) fn read(replicas: &[PathBuf], monitors: &[PathBuf]) -> Result<TokenFiles, Failure> {
        let replicas = replicas.iter().map(|path| (path.clone(), Role::Replica));
        let monitors = monitors.iter().map(|path| (path.clone(), Role::Monitor));
        let files: Vec<(PathBuf, Role)> = replicas.chain(monitors).collect();
        let keys = keys(&files)?;
        let first = keys
            .first()
            .map(Key::token)
            .ok_or_else(|| Failure::refused("no token file: give one with --token-file"))?;
        let keyring = Keyring::new(keys)
            .map_err(|count| Failure::refused(format!("{count}; give at most {MAX_KEYS} token files in all")))?;
        Ok(TokenFiles { files, first, keyring: Arc::new(keyring) })
    }

    /// Reads the files again, and logs the outcome. New connections need the tokens in them; conversations that are
    /// open go on. If a file cannot be used, the tokens read before stay valid.
    pub(crate) fn read_again(&self) {
        let replaced = keys(&self.files)
            .and_then(|keys| self.keyring.replace(keys).map_err(|count| Failure::refused(count.to_string())));
        match replaced {
            Ok(()) => tracing::info!("token files read again"),
            Err(error) => tracing::error!(%error, "the tokens read before stay valid"),
        }
    }

    /// The token that this agent proves where it connects.
    pub(crate) fn first(&self) -> Arc<Token> {
        self.first.clone()
    }

    /// All tokens, for an [`Endpoint`](super::Endpoint).
    pub(crate) fn keyring(&self) -> Arc<Keyring> {
        self.keyring.clone()
    }
}

fn keys(files: &[(PathBuf, Role)]) -> Result<Vec<Key>, Failure> {
    let mut keys: Vec<Key> = Vec::new();
    for (index, (path, role)) in files.iter().enumerate() {
        let token = Token::read_file(path).map_err(|error| Failure::refused(error.to_string()))?;
        if let Some(same) = keys.iter().position(|key| key.bytes() == token.bytes()) {
            let (one, other) = (files[same].0.display(), files[index].0.display());
            let text = format!("the token files {one} and {other} hold the same token: give each a token of its own");
            return Err(Failure::refused(text));
        }
        keys.push(Key::new(Arc::new(token), role.mark()));
    }
    Ok(keys)
}
