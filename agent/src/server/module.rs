//! Our module in a server: whether it is there, its version, and having it loaded.

use std::path::Path;

use remora_protocol::MODULE_PROTOCOL;
use remora_redis::resp::Frame;

use super::{Client, RefusalKind, ServerError};
use crate::library;

/// Whether the server has a module of our version. Without one, and with a `wished` path, it is told to load that file first; an empty
/// path stands for the library beside this program.
///
/// # Errors
/// The server does not answer, or answers something unexpected.
pub(crate) async fn find(client: &mut Client, wished: Option<&Path>) -> Result<bool, ServerError> {
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
                tracing::warn!(theirs = ?protocol, ours = MODULE_PROTOCOL, "the server's module is of another version: upgrade the older of the two");
            }
            Ok(understood)
        }
        Err(error) if error.refusal() == Some(RefusalKind::Unknown) => Ok(false),
        Err(error) if error.refusal() == Some(RefusalKind::NoPerm) => {
            tracing::warn!(
                "the server may have the module, but our user may not ask it: +remora.status +remora.arm +remora.disarm"
            );
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

async fn load(client: &mut Client, path: &Path) {
    let path = match path.as_os_str().is_empty() {
        false => path.to_owned(),
        true => match library::find() {
            Ok(path) => path,
            Err(failure) => return tracing::warn!(%failure, "the module is not loaded"),
        },
    };
    match client.command(&["MODULE", "LOAD", &path.display().to_string()]).await {
        Ok(_) => tracing::info!(path = %path.display(), "the server has loaded the module"),
        Err(error) => tracing::warn!(%error, path = %path.display(), "the server does not load the module"),
    }
}

/// A value out of a list of names and values, as `REMORA.STATUS` answers.
pub(crate) fn field(frame: &Frame, name: &[u8]) -> Option<String> {
    let Frame::Array(items) = frame else { return None };
    let pair = items.chunks(2).find(|pair| matches!(pair, [Frame::Bulk(found), _] if found == name))?;
    match pair {
        [_, Frame::Bulk(value)] => Some(String::from_utf8_lossy(value).into_owned()),
        _ => None,
    }
}

/// Whether a module with that answer to `REMORA.STATUS` speaks our version of the module protocol.
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
