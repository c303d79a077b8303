//! A host and a port, as options and Sentinels name them.

/// A host (name or address) and a port, written `HOST:PORT` or `[IPV6]:PORT`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    /// Name or address; IPv6 without brackets.
    pub host: String,
    /// The port, never 0.
    pub port: u16,
}

impl std::str::FromStr for HostPort {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let has_port = text.rsplit_once(':').is_some_and(|(host, _)| !host.contains(':') || host.ends_with(']'));
        if !has_port || text.contains('/') {
            return Err("expected HOST:PORT, as in db1:6379 or [::1]:6379".into());
        }
        // The rules are those of a server's address, without its scheme.
        let url = format!("redis://{text}").parse::<crate::server::ServerUrl>().map_err(|error| error.to_string())?;
        let (host, port) = url.host_and_port().ok_or("expected HOST:PORT")?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl std::fmt::Display for HostPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_host_and_a_port_are_both_needed() {
        assert_eq!("db1:6379".parse::<HostPort>().unwrap(), HostPort { host: "db1".into(), port: 6379 });
        assert_eq!("[::1]:80".parse::<HostPort>().unwrap().to_string(), "[::1]:80");
        for wrong in ["db1", "[::1]", "::1", "db1:", "db1:0", "db1:80/2", ":80", "user@db1:80", "redis://db1:80"] {
            assert!(wrong.parse::<HostPort>().is_err(), "{wrong}");
        }
    }
}
