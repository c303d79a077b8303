//! The module in a server: whether it is loaded, its version, and how to load it.

use std::path::{Path, PathBuf};

use remora_protocol::MODULE_PROTOCOL;
use remora_redis::resp::Frame;

use super::{Client, RefusalKind, ServerError};

/// What a module of this version offers for captures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Whether a fork child may walk in the fast way, or why not.
    pub fast_capture: Result<(), String>,
    /// Whether the server writes the snapshots of syncs to files first. The module takes no part in these.
    pub saves_to_files: bool,
}

/// What the server's module offers, if it has one of this version. If it has none and `wished` names a library, the
/// server is told to load it first. An empty path stands for the library beside this program.
///
/// # Errors
/// The server does not answer, or its answer is unexpected.
pub async fn find(client: &mut Client, wished: Option<&Path>) -> Result<Option<Offer>, ServerError> {
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
        true => match library() {
            Ok(path) => path,
            Err(error) => return tracing::warn!(%error, "the module was not loaded"),
        },
    };
    match client.command(&["MODULE", "LOAD", &path.display().to_string()]).await {
        Ok(_) => tracing::info!(path = %path.display(), "the server loaded the module"),
        Err(error) => tracing::warn!(%error, path = %path.display(), "the server did not load the module"),
    }
}

/// A value from a list of names and values, as `REMORA.STATUS` answers.
pub fn field(frame: &Frame, name: &[u8]) -> Option<String> {
    let Frame::Array(items) = frame else { return None };
    let pair = items.chunks(2).find(|pair| matches!(pair, [Frame::Bulk(found), _] if found == name))?;
    match pair {
        [_, Frame::Bulk(value)] => Some(String::from_utf8_lossy(value).into_owned()),
        _ => None,
    }
}

/// What the module says about fast keys: `yes`, or `no: ` and the reason.
pub fn yes_or_why(answer: Option<&str>) -> Result<(), String> {
    match answer {
        Some("yes") => Ok(()),
        Some(text) => Err(text.strip_prefix("no: ").unwrap_or(text).to_owned()),
        None => Err("the module does not say".to_owned()),
    }
}

/// Whether a module with this answer to `REMORA.STATUS` speaks this version of the module protocol.
pub fn speaks_our_protocol(status: &Frame) -> bool {
    field(status, b"protocol").and_then(|version| version.parse().ok()) == Some(MODULE_PROTOCOL)
}

/// Why the module's library is not found: whoever has installed this program puts it beside it.
#[derive(Debug, thiserror::Error)]
pub enum NoLibrary {
    /// The system does not say where this program is.
    #[error("cannot find out the path of this program: {0}")]
    NoProgram(std::io::Error),
    /// It is at none of the places where it is looked for.
    #[error(
        "there is no {LIBRARY} at {0}: build it with `cargo build --release -p remora-module`, or put it beside this program"
    )]
    NotThere(String),
}

/// The path of the library that belongs to this program.
///
/// # Errors
/// The library is in none of the places where it is searched; the message names them.
pub fn library() -> Result<PathBuf, NoLibrary> {
    let places = places(&std::env::current_exe().map_err(NoLibrary::NoProgram)?);
    places.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let looked: Vec<String> = places.iter().map(|path| path.display().to_string()).collect();
        NoLibrary::NotThere(looked.join(" or "))
    })
}

/// Where the library is searched: beside the program, as cargo builds it; as packages install it; and, for a test's
/// program, one folder up.
fn places(program: &Path) -> Vec<PathBuf> {
    let folder = program.parent().unwrap_or(Path::new("."));
    let above = folder.parent().unwrap_or(folder);
    vec![folder.join(LIBRARY), above.join("lib/remora").join(LIBRARY), above.join(LIBRARY)]
}

/// The file's name.
pub const LIBRARY: &str = "libremora_module.so";

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

    #[test]
    fn the_library_is_looked_for_beside_the_program_and_where_packages_put_it() {
        let places = places(Path::new("/usr/bin/remora"));
        assert_eq!(places[0], Path::new("/usr/bin/libremora_module.so"));
        assert_eq!(places[1], Path::new("/usr/lib/remora/libremora_module.so"));
    }
}
