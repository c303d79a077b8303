//! Credentials: keys from a file in the format of `~/.aws/credentials`.

use std::path::{Path, PathBuf};

use object_store::aws::AwsCredential;
use remora_wire::secret_file;

use crate::exit::Failure;

/// Bytes of a file at most: some hundred profiles.
const FILE_BYTES: usize = 64 << 10;

/// The profile that counts if none is named.
const PROFILE: &str = "default";

/// The file that the tools of AWS read, if it is there.
pub(super) fn usual_file() -> Option<PathBuf> {
    let named = std::env::var_os("AWS_SHARED_CREDENTIALS_FILE").map(PathBuf::from);
    let file = named.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".aws/credentials")));
    file.filter(|file| file.is_file())
}

/// Reads the keys of the profile `AWS_PROFILE`, or `default`.
///
/// # Errors
/// The file cannot be read, is not for its owner alone, or has no such profile.
pub(super) fn read(file: &Path) -> Result<AwsCredential, Failure> {
    let unusable = |what: &dyn std::fmt::Display| {
        Failure::refused(format!("the credentials in {} cannot be used: {what}", file.display()))
    };
    let bytes = secret_file::read(file, FILE_BYTES + 1).map_err(|error| unusable(&error))?;
    if bytes.len() > FILE_BYTES {
        return Err(unusable(&"the file is too long"));
    }
    let text = String::from_utf8(bytes).map_err(|_| unusable(&"the file is not text"))?;
    let profile = std::env::var("AWS_PROFILE").ok().filter(|name| !name.is_empty());
    let profile = profile.as_deref().unwrap_or(PROFILE);
    parse(&text, profile).map_err(|what| unusable(&what))
}

fn parse(text: &str, profile: &str) -> Result<AwsCredential, String> {
    let (mut key_id, mut secret_key, mut token, mut is_meant, mut is_there) = (None, None, None, false, false);
    for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_meant = name.trim() == profile;
            is_there |= is_meant;
        } else if let (true, Some((name, value))) = (is_meant, line.split_once('=')) {
            let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            match &*name.trim().to_ascii_lowercase() {
                "aws_access_key_id" => key_id = value,
                "aws_secret_access_key" => secret_key = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    match (key_id, secret_key) {
        (Some(key_id), Some(secret_key)) => Ok(AwsCredential { key_id, secret_key, token }),
        _ if is_there => Err(format!("the profile {profile} needs aws_access_key_id and aws_secret_access_key")),
        _ => Err(format!("it has no profile {profile}; AWS_PROFILE names another one")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const TEXT: &str = "# keys\n[default]\naws_access_key_id = id\naws_secret_access_key=se=cret\n\n\
                        [other]\nAWS_ACCESS_KEY_ID=id2\naws_secret_access_key = s2\naws_session_token = t2\n[half]\naws_access_key_id=x\n";

    #[test]
    fn the_keys_of_one_profile_are_read() {
        let read = parse(TEXT, "default").unwrap();
        assert_eq!((&*read.key_id, &*read.secret_key, read.token), ("id", "se=cret", None));
        let read = parse(TEXT, "other").unwrap();
        assert_eq!((&*read.key_id, &*read.secret_key, read.token.as_deref()), ("id2", "s2", Some("t2")));
        assert!(parse(TEXT, "half").unwrap_err().contains("half needs"));
        assert!(parse(TEXT, "missing").unwrap_err().contains("no profile missing"));
    }
}
