//! The module in a server: whether it is loaded, its version, and how to load it.

use std::path::Path;

use remora_protocol::MODULE_PROTOCOL;
use remora_redis::resp::Frame;

use super::{Client, RefusalKind, ServerError};
use crate::tools;

/// What a module of this version offers for captures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    /// Whether a fork child may walk in the fast way, or why not.
    pub(crate) fast_capture: Result<(), String>,
    /// Whether the server writes the snapshots of syncs to files first. The module takes no part in these.
    pub(crate) saves_to_files: bool,
}

/// What the server's module offers, if it has one of this version. If it has none and `wished` names a library, the
/// server is told to load it first. An empty path stands for the library beside this program.
///
/// # Errors
/// The server does not answer, or its answer is unexpected.
pub(crate) async fn find(client: &mut Client, wished: Option<&Path>) -> Result<Option<Offer>, ServerError> {
    let mut answer = client.command(&["REMORA.STATUS"]).await;
    if let (Err(error), Some(path)) = (&answer, wished)
        && error.refusal() == Some(RefusalKind::Unknown)
    {
        load(client, path).await;
        answer = client.command(&["REMORA.STATUS"]).await;
    }
    match answer {
        Ok(frame) => {
            let protocol = field(&frame, b"protocol");
            let understood = speaks_our_protocol(&frame);
            if !understood {
                tracing::warn!(theirs = ?protocol, ours = MODULE_PROTOCOL, "the server's module speaks another version of the module protocol: upgrade the older of the two");
            }
            let fast_capture = yes_or_why(field(&frame, b"fast_capture").as_deref());
            let saves_to_files = field(&frame, b"syncs_go_to").as_deref() == Some("files");
            Ok(understood.then_some(Offer { fast_capture, saves_to_files }))
        }
        Err(error) if error.refusal() == Some(RefusalKind::Unknown) => Ok(None),
        Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => {
            tracing::warn!(
                "the server may have the module, but the ACL user may not use it: grant +remora.status +remora.arm +remora.disarm"
            );
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

async fn load(client: &mut Client, path: &Path) {
    let path = match path.as_os_str().is_empty() {
        false => path.to_owned(),
        true => match tools::find_module() {
            Ok(path) => path,
            Err(failure) => return tracing::warn!(%failure, "the module was not loaded"),
        },
    };
    match client.command(&["MODULE", "LOAD", &path.display().to_string()]).await {
        Ok(_) => tracing::info!(path = %path.display(), "the server loaded the module"),
        Err(error) => tracing::warn!(%error, path = %path.display(), "the server did not load the module"),
    }
}

/// A value from a list of names and values, as `REMORA.STATUS` answers.
pub(crate) fn field(frame: &Frame, name: &[u8]) -> Option<String> {
    let Frame::Array(items) = frame else { return None };
    let pair = items.chunks(2).find(|pair| matches!(pair, [Frame::Bulk(found), _] if found == name))?;
    match pair {
        [_, Frame::Bulk(value)] => Some(String::from_utf8_lossy(value).into_owned()),
        _ => None,
    }
}

/// What the module says about fast keys: `yes`, or `no: ` and the reason.
pub(crate) fn yes_or_why(answer: Option<&str>) -> Result<(), String> {
    match answer {
        Some("yes") => Ok(()),
        Some(text) => Err(text.strip_prefix("no: ").unwrap_or(text).to_owned()),
        None => Err("the module does not say".to_owned()),
    }
}

/// Whether a module with this answer to `REMORA.STATUS` speaks this version of the module protocol.
pub(crate) fn speaks_our_protocol(status: &Frame) -> bool {
    field(status, b"protocol").and_then(|version| version.parse().ok()) == Some(MODULE_PROTOCOL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_of_a_status_is_found_by_its_name() {
        let bulk = |text: &str| Frame::Bulk(text.as_bytes().to_vec());
        let status = Frame::Array(vec![bulk("version"), bulk("0.1.0"), bulk("protocol"), bulk("1")]);
        assert_eq!(field(&status, b"protocol").as_deref(), Some("1"));
        assert_eq!(field(&status, b"1"), None);
        assert_eq!(field(&Frame::Null, b"protocol"), None);
    }
}
