//! Roles: what a peer may ask for.

use remora_protocol::Message;

/// What a peer may ask for. It follows from the token that the peer proved, and from the names in its certificate.
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

    /// The mark of a token with this role in a keyring.
    pub(super) fn mark(self) -> u16 {
        match self {
            Role::Replica => 0,
            Role::Monitor => 1,
        }
    }

    /// The role with this mark. A mark of no role permits the least.
    pub(super) fn of_mark(mark: u16) -> Role {
        if mark == Role::Replica.mark() { Role::Replica } else { Role::Monitor }
    }

    /// What both roles permit.
    pub(super) fn and(self, other: Role) -> Role {
        if self == other { self } else { Role::Monitor }
    }
}
