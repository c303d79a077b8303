//! Where backups are: a folder, or a bucket of an S3-compatible store.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use clap::Args;

/// A place for backups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A file or folder of this host; `-` is standard output for a command that writes there.
    Path(PathBuf),
    /// Objects of a bucket whose keys begin with this prefix. The prefix has no slash at its ends, and may be empty.
    Bucket {
        /// The bucket.
        bucket: String,
        /// The prefix.
        prefix: String,
    },
}

/// How the address of a bucket begins.
const SCHEME: &str = "s3://";

impl Location {
    /// Reads an argument.
    ///
    /// # Errors
    /// It begins as the address of a bucket, and is not one.
    pub fn parse(text: OsString) -> Result<Location, String> {
        let Some(rest) = text.to_str().and_then(|text| text.strip_prefix(SCHEME)) else {
            return Ok(Location::Path(PathBuf::from(text)));
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        let is_part = |part: &str| !part.is_empty() && part != "." && part != "..";
        let is_bucket =
            !bucket.is_empty() && bucket.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_'));
        if !is_bucket || !(prefix.is_empty() || prefix.split('/').all(is_part)) {
            return Err(format!("{SCHEME}{rest} is not the address of a bucket: write s3://BUCKET/PREFIX"));
        }
        Ok(Location::Bucket { bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }

    /// Whether it is standard output.
    pub fn is_stdout(&self) -> bool {
        *self == Location::Path(PathBuf::from("-"))
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Path(path) => path.display().fmt(f),
            Location::Bucket { bucket, prefix } if prefix.is_empty() => write!(f, "{SCHEME}{bucket}"),
            Location::Bucket { bucket, prefix } => write!(f, "{SCHEME}{bucket}/{prefix}"),
        }
    }
}

/// How an S3-compatible store is reached. Every option stands above the AWS environment variable of the same meaning.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "S3")]
pub struct StoreArgs {
    /// Address of the store: `https://HOST:PORT`. Default: AWS_ENDPOINT_URL, or Amazon's of the region.
    #[arg(long, value_name = "URL")]
    pub s3_endpoint: Option<String>,

    /// Region of the bucket. Default: AWS_REGION, or `us-east-1`, which most other stores ignore.
    #[arg(long, value_name = "NAME")]
    pub s3_region: Option<String>,

    /// File with the keys, in the format of ~/.aws/credentials (the profile AWS_PROFILE, or `default`), that only its
    /// owner can read. Default: the AWS environment variables, then AWS_SHARED_CREDENTIALS_FILE and
    /// ~/.aws/credentials, then the role of the machine.
    #[arg(long, value_name = "FILE")]
    pub s3_credentials_file: Option<PathBuf>,

    /// Send requests to an --s3-endpoint on another host by http:// too. Everyone on the way can read what is not
    /// encrypted.
    #[arg(long)]
    pub s3_allow_http: bool,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_address_of_a_bucket_is_told_from_a_path() {
        let parse = |text: &str| Location::parse(text.into());
        let bucket = |bucket: &str, prefix: &str| Location::Bucket { bucket: bucket.into(), prefix: prefix.into() };
        assert_eq!(parse("s3://b").unwrap(), bucket("b", ""));
        assert_eq!(parse("s3://b/").unwrap(), bucket("b", ""));
        assert_eq!(parse("s3://my-b.x/a/b/").unwrap(), bucket("my-b.x", "a/b"));
        assert_eq!(parse("s3://b/a/b").unwrap().to_string(), "s3://b/a/b");
        assert_eq!(parse("/backups").unwrap(), Location::Path("/backups".into()));
        assert!(parse("-").unwrap().is_stdout());
        for wrong in ["s3://", "s3:///a", "s3://b//a/../c", "s3://b/a//b", "s3://a b/c", "s3://b/./c"] {
            assert!(parse(wrong).unwrap_err().contains("s3://BUCKET/PREFIX"), "{wrong}");
        }
    }
}
