//! The keys by which a worker finds its links and its sessions. A key that is out of date finds nothing.

use slotmap::{Key, KeyData, new_key_type};

use crate::connection::Connection;
use crate::session::LinkId;

new_key_type! {
    /// A link of a worker. A key is never used for two links.
    pub(crate) struct LinkKey;
}

impl LinkKey {
    /// The same as a session knows it.
    pub(super) fn id(self) -> LinkId {
        LinkId(self.data().as_ffi())
    }

    pub(super) fn of(id: LinkId) -> LinkKey {
        LinkKey::from_raw(id.0)
    }

    pub(super) fn from_raw(raw: u64) -> LinkKey {
        KeyData::from_ffi(raw).into()
    }
}

new_key_type! {
    /// A session of a worker. A key is never used for two sessions.
    pub(crate) struct SessionKey;
}

impl SessionKey {
    /// The session of a connection, as its worker has noted it there.
    pub(super) fn of(connection: &Connection) -> SessionKey {
        KeyData::from_ffi(connection.session_key()).into()
    }
}

#[cfg(test)]
mod tests {
    use slotmap::SlotMap;

    use super::*;

    #[test]
    fn a_key_survives_the_ways_through_epoll_and_a_session() {
        let mut links: SlotMap<LinkKey, ()> = SlotMap::with_key();
        let key = links.insert(());
        assert_eq!(LinkKey::from_raw(key.data().as_ffi()), key);
        assert_eq!(LinkKey::of(key.id()), key);
        assert_eq!(links.get(LinkKey::from_raw(u64::MAX)), None);
    }
}
