//! The arguments that say where data are stored: how a bucket is reached, and what a source makes a snapshot of.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use clap::builder::{OsStringValueParser, TypedValueParser};
use remora_backup::restore::Places;
use remora_backup::{Location, SPOOL, StoreOptions};
use remora_process::stored::Stored;

/// What a source makes a snapshot of before its server is asked for one.
#[derive(Args, Clone, Debug)]
pub struct BaseArgs {
    /// Make a snapshot of what is stored there before the server is asked for one: an RDB file, a folder of `remora
    /// backup` or of a server (its dump.rdb), or s3://BUCKET/PREFIX of `remora backup`. It serves at any age, if the
    /// server's backlog reaches back to it. Of several the newest one that serves is taken; if none does, a sweep or a
    /// fork follows. Can be given several times.
    #[arg(long, value_name = "PATH|URL", value_parser = OsStringValueParser::new().try_map(Location::parse), conflicts_with = "from_file", help_heading = "Snapshot")]
    pub base: Vec<Location>,

    /// File with the age identity of encrypted backups at --base, that only its owner can read.
    #[arg(long, value_name = "FILE", requires = "base", help_heading = "Snapshot")]
    pub base_identity: Option<PathBuf>,

    /// Folder in whose file system a backup that comes from a bucket is kept, in plain, until it has been read.
    #[arg(long, value_name = "DIR", default_value = SPOOL, requires = "base", help_heading = "Snapshot")]
    pub base_spool: PathBuf,

    /// For a bucket at --base, as --s3-endpoint of `remora backup`.
    #[arg(long, value_name = "URL", requires = "base", help_heading = "Snapshot")]
    pub base_s3_endpoint: Option<String>,

    /// For a bucket at --base, as --s3-region of `remora backup`.
    #[arg(long, value_name = "NAME", requires = "base", help_heading = "Snapshot")]
    pub base_s3_region: Option<String>,

    /// For a bucket at --base, as --s3-credentials-file of `remora backup`.
    #[arg(long, value_name = "FILE", requires = "base", help_heading = "Snapshot")]
    pub base_s3_credentials_file: Option<PathBuf>,

    /// For a bucket at --base, as --s3-allow-http of `remora backup`.
    #[arg(long, requires = "base", help_heading = "Snapshot")]
    pub base_s3_allow_http: bool,
}

impl BaseArgs {
    /// The places, without their clap attributes; `None` if none is named.
    pub(crate) fn stored(&self) -> Option<Arc<dyn Stored>> {
        let places = Places {
            at: self.base.clone(),
            store: StoreOptions {
                endpoint: self.base_s3_endpoint.clone(),
                region: self.base_s3_region.clone(),
                credentials_file: self.base_s3_credentials_file.clone(),
                allow_http: self.base_s3_allow_http,
            },
            identity: self.base_identity.clone(),
            spool: self.base_spool.clone(),
        };
        (!places.at.is_empty()).then(|| Arc::new(places) as Arc<dyn Stored>)
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

impl StoreArgs {
    /// The options without their clap attributes.
    pub(crate) fn options(&self) -> StoreOptions {
        StoreOptions {
            endpoint: self.s3_endpoint.clone(),
            region: self.s3_region.clone(),
            credentials_file: self.s3_credentials_file.clone(),
            allow_http: self.s3_allow_http,
        }
    }
}
