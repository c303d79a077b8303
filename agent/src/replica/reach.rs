//! Reach: whether the primary would have the replica's server, asked from where that connects and as its user.
//!
//! The preflight connects from an address of the kernel's choice. A server with `bind-source-addr` connects from
//! another one, from which a firewall, or the primary's protected mode, may keep it away. And a user that may log in
//! need not be one that may replicate.

use std::net::IpAddr;

use super::locality::Locality;
use super::preflight::Primary;
use super::target::Target;
use crate::exit::{Code, Failure};
use crate::server::permission::{Permission, TO_REPLICATE};
use crate::server::{Client, Facts, ServerError};

/// Connects to the primary as the server would. Returns what could not be checked.
///
/// # Errors
/// The primary cannot be reached from there, or does not permit what a replica needs.
pub(super) async fn check(client: &mut Client, target: &Target, primary: &Primary) -> Result<Vec<String>, Failure> {
    let (mut unchecked, url) = (Vec::new(), client.server().url().clone());
    let own = client.config_get("bind-source-addr").await?.filter(|text| !text.is_empty());
    let locality = Locality::of(client, target.facts.process_id);
    let is_here = locality.server.is_none() || locality.uid.is_some();
    let at = format!("{}:{}", primary.host, primary.port);
    let address = own.as_ref().and_then(|text| text.parse::<IpAddr>().ok()).filter(|_| is_here);
    let mut asked = match (address, own) {
        (Some(address), _) => primary.server.connect_from(address).await.map_err(|error| {
            let text = format!(
                "the server {url} connects to its primary from {address} (bind-source-addr), and {at} cannot be used from there: \
                 {error}; correct bind-source-addr, or let the primary accept that address"
            );
            if error.is_passing() { Failure::passing(Code::Server, text) } else { Failure::refused(text) }
        })?,
        (None, own) => {
            unchecked.extend(own.map(|own| format!("whether {at} can be reached from {own}, the server's bind-source-addr")));
            primary.server.connect().await?
        }
    };
    let unknown = Facts::default();
    for needed in TO_REPLICATE {
        match needed.ask(&mut asked, primary.facts.as_ref().unwrap_or(&unknown)).await? {
            Permission::Granted => {}
            Permission::Unknown => {
                unchecked.push(format!("whether {at} permits {} to the server's user", needed.name()));
            }
            Permission::Refused(ServerError::Refused { text, .. }) => {
                return Err(Failure::refused(format!(
                    "the primary {at} does not permit the user of {url} what a replica needs (+psync +replconf +ping): {text}"
                )));
            }
            Permission::Refused(error) => return Err(error.into()),
        }
    }
    Ok(unchecked)
}
