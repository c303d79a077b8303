//! Memory handed to another process of this host that shall *write* it: descriptors, over a local socket, once.
//!
//! Not a transport: nothing is read here, and who takes part is told beforehand by other means (a command to a server). The giver
//! listens under a fresh random name; the taker is told the name and a secret, connects and shows the secret; the descriptors
//! ride back, and the socket is gone.
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

/// One offer to hand descriptors over, to whoever knows its address and its secret.
pub struct Handover {
    listener: OwnedFd,
    address: local::Address,
    secret: [u8; SECRET_BYTES],
}

impl Handover {
    /// Listens. In a folder the socket is a file, for processes of another network namespace; otherwise it has a name only.
    ///
    /// # Errors
    /// [`Error::System`].
    pub fn bind(place: &Place) -> Result<Handover, Error> {
        let (listener, address) = local::listen(place)?;
        let mut secret = [0; SECRET_BYTES];
        local::random(&mut secret)?;
        Ok(Handover { listener, address, secret })
    }

    /// Where: `@name`, or the path of a file.
    pub fn address(&self) -> String {
        self.address.name()
    }

    /// What the taker must show, in hexadecimal digits.
    pub fn secret(&self) -> String {
        self.secret.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Waits for the taker and hands the descriptors over. Others who come are sent away.
    ///
    /// # Errors
    /// [`Error::TimedOut`] if the taker does not come; [`Error::System`].
    pub fn give(&self, descriptors: &[BorrowedFd<'_>], within: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + within;
        let late = || Error::TimedOut { what: "the process that memory was to be handed to", after: within };
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
                Ok(_) | Err(Error::Protocol(_)) => tracing::warn!("somebody without the secret asked for a handover"),
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
        // The packet says how many there are, so that the taker notices if one is missing.
        local::send(taker, &[count], Some(*descriptor)).map_err(Error::system("handing over a descriptor"))?;
    }
    Ok(())
}

/// Takes what is offered at `address` to those who know `secret`.
///
/// # Errors
/// [`Error::Misuse`] if one of them is malformed, [`Error::Unreachable`] if nobody offers there, [`Error::TimedOut`], and
/// [`Error::Protocol`] if the giver hangs up: then the secret is wrong.
pub fn take(address: &str, secret: &str, within: Duration) -> Result<Vec<OwnedFd>, Error> {
    let address = local::Address::parse(address).ok_or(Error::Misuse("an address is @name or an absolute path"))?;
    let secret = parse_secret(secret).ok_or(Error::Misuse("the secret is not one of a handover"))?;
    let deadline = Instant::now() + within;
    let socket = local::connect(&address, deadline)?;
    local::send(&socket, &secret, None).map_err(Error::system("showing a secret"))?;
    let mut taken = Vec::new();
    loop {
        let packet = local::receive_by(&socket, deadline, within)?;
        let count = packet.bytes().first().copied().filter(|count| *count <= DESCRIPTORS_MAX).unwrap_or(0);
        let Some(descriptor) = packet.descriptor else {
            return Err(Error::Protocol("a packet of a handover without its descriptor"));
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

/// Takes the same time whichever byte differs.
fn equal(shown: &[u8], secret: &[u8; SECRET_BYTES]) -> bool {
    shown.len() == secret.len() && shown.iter().zip(secret).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
}

/// Bytes of a secret: not to be guessed in the seconds for which an offer stands.
const SECRET_BYTES: usize = 16;

/// The most descriptors of one handover; a table and what belongs to it are few.
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
    fn nobody_waits_for_ever() {
        let handover = Handover::bind(&Place::Abstract).unwrap();
        let none = handover.give(&[], Duration::from_millis(20));
        assert!(matches!(none, Err(Error::TimedOut { .. })));
        let silent = take(&handover.address(), &handover.secret(), Duration::from_millis(20));
        assert!(matches!(silent, Err(Error::TimedOut { .. })));
    }

    #[test]
    fn what_is_no_address_or_no_secret_is_refused_before_anything_is_done() {
        for address in ["", "relative/path", "@"] {
            assert!(matches!(take(address, &"00".repeat(SECRET_BYTES), SOON), Err(Error::Misuse(_))), "{address}");
        }
        for secret in ["", "00", "zz", &"é".repeat(SECRET_BYTES), &"0".repeat(2 * SECRET_BYTES - 1)] {
            assert!(matches!(take("@nobody", secret, SOON), Err(Error::Misuse(_))), "{secret}");
        }
    }
}
