//! What both ends of a data lane must derive alike.

/// The label under which data lanes derive their secret from the session's key.
pub(crate) const LANES_LABEL: &[u8] = b"remora data lanes";
