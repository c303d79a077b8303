//! Roles: what a peer may ask for.

use remora_protocol::Message;

/// What a peer may ask for. It follows from the token that the peer proved, and from the names in its certificate. Each
/// role permits what those before it permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The status, and nothing else. No byte of the data set is in it.
    Monitor,
    /// The status, and memory to measure the transports with. No byte of the data set is in either.
    Probe,
    /// Everything: the peer may become a replica.
    Replica,
}

impl Role {
    /// Whether a peer with this role may send this message.
    pub(crate) fn may_send(self, message: &Message) -> bool {
        match message {
            Message::StatusQuery | Message::Leave { .. } => true,
            Message::ProbeQuery => self >= Role::Probe,
            _ => self == Role::Replica,
        }
    }

    /// What the role permits, for a peer that asked for more.
    pub(crate) fn permits(self) -> &'static str {
        match self {
            Role::Monitor => "the status only",
            Role::Probe => "the status and measurements only",
            Role::Replica => "everything",
        }
    }

    /// The mark of a token with this role in a keyring.
    pub(super) fn mark(self) -> u16 {
        match self {
            Role::Replica => 0,
            Role::Monitor => 1,
            Role::Probe => 2,
        }
    }

    /// The role with this mark. A mark of no role permits the least.
    pub(super) fn of_mark(mark: u16) -> Role {
        [Role::Replica, Role::Probe].into_iter().find(|role| role.mark() == mark).unwrap_or(Role::Monitor)
    }

    /// What both roles permit.
    pub(super) fn and(self, other: Role) -> Role {
        self.min(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROLES: [Role; 3] = [Role::Monitor, Role::Probe, Role::Replica];

    #[test]
    fn a_role_permits_its_own_requests_and_those_of_the_roles_before_it() {
        let join = Message::HandOffQuery { generation: 1, offset: 1 };
        let permitted =
            |role: Role| [&Message::StatusQuery, &Message::ProbeQuery, &join].map(|message| role.may_send(message));
        assert_eq!(ROLES.map(permitted), [[true, false, false], [true, true, false], [true, true, true]]);
    }

    #[test]
    fn a_token_and_a_certificate_together_permit_what_both_do() {
        for (at, role) in ROLES.into_iter().enumerate() {
            assert_eq!(Role::of_mark(role.mark()), role);
            for (other_at, other) in ROLES.into_iter().enumerate() {
                assert_eq!(role.and(other), ROLES[at.min(other_at)]);
            }
        }
        assert_eq!(Role::of_mark(u16::MAX), Role::Monitor);
    }
}
