//! The options of a replica that lends slots to others.

use std::{net::SocketAddr, time::Duration};

use clap::Args;

use super::{UploadLimit, security::LenderNameArgs, upload::parse_rate};
use crate::units::{Size, parse_duration};

/// How a replica lends slots to other replicas.
#[derive(Clone, Debug, Default, Args)]
pub struct RelayArgs {
    /// Lend received slots to other replicas, so that the source sends each of them about once. This opens a port,
    /// which is printed. The default, unless the source is on this host (`--transport auto`), or read by shared memory,
    /// or `--state-dir` is given.
    #[arg(long, overrides_with = "no_serve_peers", help_heading = "Other replicas")]
    pub serve_peers: bool,

    /// Serve no slots to other replicas. The agent can still read slots from them.
    #[arg(long, overrides_with = "serve_peers", help_heading = "Other replicas")]
    pub no_serve_peers: bool,

    /// Address and port to lend slots at. Default: the local address of the connection to the source, and any free
    /// port.
    #[arg(long, value_name = "ADDR:PORT", help_heading = "Other replicas")]
    pub peer_listen: Option<SocketAddr>,

    /// How fast all other replicas together read from this one. `auto`: over TCP as a background transfer, which leaves
    /// the network link to other traffic. `none`: as fast as they can. SIZE: bytes per second, over every transport.
    #[arg(long, value_name = "auto|none|SIZE", default_value = "auto", help_heading = "Other replicas")]
    pub upload_limit: UploadLimit,

    /// Bytes per second that each other replica reads from this one.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, help_heading = "Other replicas")]
    pub upload_limit_per_peer: Option<Size>,

    /// Bytes per second received from the source and from other replicas together, if slots can be read from other
    /// replicas. The stream of writes is never delayed; the snapshot gets the rest.
    #[arg(long, value_name = "SIZE", value_parser = parse_rate, help_heading = "Other replicas")]
    pub download_limit: Option<Size>,

    /// Location of this replica: a rack, a room, a region. Replicas prefer upstreams in the same zone.
    #[arg(long, value_name = "LABEL", default_value = "", value_parser = parse_zone, help_heading = "Other replicas")]
    pub zone: String,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub lender: LenderNameArgs,
}

/// The same, and how long it goes on when it needs the slots no more.
#[derive(Clone, Debug, Args)]
pub struct LendArgs {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub relay: RelayArgs,

    /// How long to keep serving slots to other replicas after this replica's own server was handed over, at most. The
    /// agent ends that earlier if no replica reads from it.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = parse_duration, help_heading = "Other replicas")]
    pub linger: Duration,
}

fn parse_zone(text: &str) -> Result<String, String> {
    let most = remora_protocol::MAX_ZONE_BYTES;
    if text.len() > most { Err(format!("at most {most} bytes are allowed")) } else { Ok(text.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_is_no_longer_than_its_field() {
        assert!(parse_zone(&"z".repeat(32)).is_ok());
        assert!(parse_zone(&"z".repeat(33)).is_err());
    }
}
