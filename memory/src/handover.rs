//! Hands memory to another process of this host for *writing*: passes descriptors over a local socket, once.
//!
//! This is not a transport: no bytes are read here. The giver listens under a random name. The taker learns the name
//! and a secret by other means (a command to a server), connects and sends the secret. The giver sends the descriptors,
//! and the socket is removed.
//!
//! ```text
//!   giver                                      taker
//!   Handover::bind ──▶ address, secret ─ ─ ─ ─▶ (by a command)
//!   give ◀── connect ─────────────────────────── take
//!        ◀── the secret ────────────────────────
//!        ─── one packet for each descriptor ───▶
//! ```

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use crate::{Error, Place, local, wait_readable};

/// An offer of descriptors to the process that knows its address and its secret.
pub struct Handover {
    listener: OwnedFd,
    address: local::Address,
    secret: [u8; SECRET_BYTES],
}

impl Handover {
    /// Starts listening. In a folder the socket is a file, which processes of another network namespace can reach;
    /// otherwise the socket has an abstract name.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn bind(place: &Place) -> Result<Handover, Error> {
        let (listener, address) = local::listen(place)?;
        let mut secret = [0; SECRET_BYTES];
        local::random(&mut secret)?;
        Ok(Handover { listener, address, secret })
    }

    /// The address: `@name`, or the path of a file.
    pub fn address(&self) -> String {
        self.address.name()
    }

    /// The secret that the taker must send, in hexadecimal digits.
    pub fn secret(&self) -> String {
        self.secret.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Waits for the taker and sends the descriptors. Connections without the secret are closed.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if the taker does not connect in time; [`Error::System`].
    pub fn give(&self, descriptors: &[BorrowedFd<'_>], within: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + within;
        let late = || Error::TimedOut { what: "the process that takes over the memory", after: within };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || !wait_readable(self.listener.as_fd(), left)? {
                return Err(late());
            }
            let Some(taker) = local::accept(&self.listener).map_err(Error::system("accepting a local connection"))?
            else {
                continue;
            };
            match local::receive_by(&taker, deadline, within) {
                Ok(packet) if equal(packet.bytes(), &self.secret) => return hand(&taker, descriptors),
                Ok(_) | Err(Error::Protocol(_)) => tracing::warn!("a process without the secret asked for a handover"),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Handover {
    fn drop(&mut self) {
        self.address.remove();
    }
}

fn hand(taker: &OwnedFd, descriptors: &[BorrowedFd<'_>]) -> Result<(), Error> {
    let count = descriptors.len() as u8;
    for descriptor in descriptors {
        // Each packet carries the number of descriptors, so that the taker notices a missing one.
        local::send(taker, &[count], Some(*descriptor)).map_err(Error::system("handing over a descriptor"))?;
    }
    Ok(())
}

/// Receives the descriptors that are offered at `address`.
///
/// # Errors
/// [`Error::Misuse`] if the address or the secret is malformed, [`Error::Unreachable`] if no process listens at the
/// address, [`Error::TimedOut`], and [`Error::Protocol`] if the giver closes the connection, which it does for a wrong
/// secret.
pub fn take(address: &str, secret: &str, within: Duration) -> Result<Vec<OwnedFd>, Error> {
    let address = local::Address::parse(address).ok_or(Error::Misuse("an address is @name or an absolute path"))?;
    let secret = parse_secret(secret).ok_or(Error::Misuse("the secret is not 32 hexadecimal digits"))?;
    let deadline = Instant::now() + within;
    let socket = local::connect(&address, deadline)?;
    local::send(&socket, &secret, None).map_err(Error::system("sending the secret of a handover"))?;
    let mut taken = Vec::new();
    loop {
        let packet = local::receive_by(&socket, deadline, within)?;
        let count = packet.bytes().first().copied().filter(|count| *count <= DESCRIPTORS_MAX).unwrap_or(0);
        let Some(descriptor) = packet.descriptor else {
            return Err(Error::Protocol("a handover packet has no descriptor"));
        };
        taken.push(descriptor);
        if taken.len() >= usize::from(count) {
            return Ok(taken);
        }
    }
}

fn parse_secret(text: &str) -> Option<[u8; SECRET_BYTES]> {
    if text.len() != 2 * SECRET_BYTES || !text.is_ascii() {
        return None;
    }
    let mut secret = [0; SECRET_BYTES];
    for (byte, digits) in secret.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(secret)
}

/// Compares in constant time.
fn equal(shown: &[u8], secret: &[u8; SECRET_BYTES]) -> bool {
    shown.len() == secret.len() && shown.iter().zip(secret).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Bytes of a secret: too many to guess in the seconds that an offer lasts.
const SECRET_BYTES: usize = 16;

/// The maximum number of descriptors in one handover. A table needs two or three.
const DESCRIPTORS_MAX: u8 = 8;

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::{Memory, Pages};

    const SOON: Duration = Duration::from_secs(10);

    fn memories() -> [Memory; 2] {
        ["first", "second"].map(|name| Memory::create(name, 4096, Pages::Small).unwrap())
    }

    fn hand_over_at(place: &Place) {
        let memories = memories();
        let handover = Handover::bind(place).unwrap();
        let (address, secret) = (handover.address(), handover.secret());
        let taker = std::thread::spawn(move || take(&address, &secret, SOON));
        handover.give(&[memories[0].as_fd(), memories[1].as_fd()], SOON).unwrap();
        let taken = taker.join().unwrap().unwrap();
        assert_eq!(taken.len(), 2);
        for (number, descriptor) in (0_u64..).zip(taken) {
            Memory::adopt(descriptor, 4096).unwrap().store_u64(8, number, std::sync::atomic::Ordering::SeqCst).unwrap();
        }
        assert_eq!(memories[1].load_u64(8, std::sync::atomic::Ordering::SeqCst).unwrap(), 1);
    }

    #[test]
    fn memory_handed_over_is_the_same_memory() {
        hand_over_at(&Place::Abstract);
    }

    #[test]
    fn a_socket_in_a_folder_does_as_well_and_leaves_no_file() {
        let folder = std::env::temp_dir().join(format!("remora-handover-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        hand_over_at(&Place::Folder(folder.clone()));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
        std::fs::remove_dir(&folder).unwrap();
    }

    #[test]
    fn without_the_secret_nothing_is_handed_over_and_the_right_one_still_gets_it() {
        let memories = memories();
        let handover = Handover::bind(&Place::Abstract).unwrap();
        let (address, secret) = (handover.address(), handover.secret());
        let takers = std::thread::spawn(move || {
            let wrong = take(&address, &"00".repeat(SECRET_BYTES), SOON);
            (wrong, take(&address, &secret, SOON))
        });
        handover.give(&[memories[0].as_fd()], SOON).unwrap();
        let (wrong, right) = takers.join().unwrap();
        assert!(matches!(wrong, Err(Error::Protocol(_) | Error::System { .. })), "{wrong:?}");
        assert_eq!(right.unwrap().len(), 1);
    }

    #[test]
    fn neither_end_waits_longer_than_its_limit() {
        let handover = Handover::bind(&Place::Abstract).unwrap();
        let none = handover.give(&[], Duration::from_millis(20));
        assert!(matches!(none, Err(Error::TimedOut { .. })));
        let silent = take(&handover.address(), &handover.secret(), Duration::from_millis(20));
        assert!(matches!(silent, Err(Error::TimedOut { .. })));
    }

    #[test]
    fn a_malformed_address_or_secret_is_refused_before_connecting() {
        for address in ["", "relative/path", "@"] {
            assert!(matches!(take(address, &"00".repeat(SECRET_BYTES), SOON), Err(Error::Misuse(_))), "{address}");
        }
        for secret in ["", "00", "zz", &"é".repeat(SECRET_BYTES), &"0".repeat(2 * SECRET_BYTES - 1)] {
            assert!(matches!(take("@unused", secret, SOON), Err(Error::Misuse(_))), "{secret}");
        }
    }
}
