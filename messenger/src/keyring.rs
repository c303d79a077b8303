//! The tokens of an endpoint. They may change while it runs, so that tokens can be replaced without a restart.

use std::ops::Deref;
use std::sync::{Arc, PoisonError, RwLock};

use remora_wire::Token;

/// The greatest number of tokens of an endpoint. Each one costs a called end an HMAC over the handshake's bytes for
/// every caller that proves an unknown token.
pub const MAX_KEYS: usize = 8;

/// A token, and the mark that its owner gave to it.
#[derive(Debug, Clone)]
pub struct Key {
    token: Arc<Token>,
    mark: u16,
}

impl Key {
    /// A key. The layer attaches no meaning to the mark; [`Negotiated::mark`](crate::Negotiated::mark) returns it for a
    /// peer that proved this token.
    pub fn new(token: Arc<Token>, mark: u16) -> Key {
        Key { token, mark }
    }

    /// The token.
    pub fn token(&self) -> Arc<Token> {
        self.token.clone()
    }

    /// The mark.
    pub fn mark(&self) -> u16 {
        self.mark
    }
}

impl Deref for Key {
    type Target = Token;

    fn deref(&self) -> &Token {
        &self.token
    }
}

/// The tokens of an endpoint: it proves the first one where it calls, and accepts all of them where it is called.
#[derive(Debug)]
pub struct Keyring(RwLock<Vec<Key>>);

impl Keyring {
    /// A keyring with these keys.
    ///
    /// # Errors
    /// [`WrongCount`].
    pub fn new(keys: Vec<Key>) -> Result<Keyring, WrongCount> {
        check(&keys)?;
        Ok(Keyring(RwLock::new(keys)))
    }

    /// A keyring with one token, whose mark is 0.
    pub fn only(token: Arc<Token>) -> Keyring {
        Keyring(RwLock::new(vec![Key::new(token, 0)]))
    }

    /// Replaces all keys. Handshakes that have begun are completed with the former keys, and sessions go on.
    ///
    /// # Errors
    /// [`WrongCount`]; the keys are unchanged.
    pub fn replace(&self, keys: Vec<Key>) -> Result<(), WrongCount> {
        check(&keys)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
        Ok(())
    }

    /// The token that this endpoint proves where it calls.
    pub fn first(&self) -> Arc<Token> {
        // There is one: no keyring is made or changed without `check`.
        self.0.read().unwrap_or_else(PoisonError::into_inner)[0].token()
    }

    /// The present keys, in order.
    pub(crate) fn keys(&self) -> Vec<Key> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// An endpoint with no token, or with more than [`MAX_KEYS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} tokens: 1 to {MAX_KEYS} are possible")]
pub struct WrongCount(pub usize);

fn check(keys: &[Key]) -> Result<(), WrongCount> {
    if (1..=MAX_KEYS).contains(&keys.len()) { Ok(()) } else { Err(WrongCount(keys.len())) }
}
