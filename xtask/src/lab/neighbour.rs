//! The router of the nodes' network, which forgets again and again who has an egress IP and asks all nodes: those that claim
//! the address answer, by ARP or neighbour discovery.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};

use super::netns::Netns;
use super::{EXT_LAN, Lab};

/// How often it forgets.
const FORGETS: Duration = Duration::from_millis(20);
const DISCARD: u16 = 9;

/// Asks until it is finished or dropped.
pub(crate) struct Asker {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Asker {
    pub(crate) fn start(lab: &Lab, addresses: Vec<IpAddr>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (router, until) = (lab.ext().clone(), Arc::clone(&stop));
        let thread = thread::spawn(move || ask(&router, &addresses, &until));
        Self { stop, thread: Some(thread) }
    }

    pub(crate) fn finish(mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().ok_or_else(|| anyhow!("the neighbour has been finished already"))?;
        thread.join().map_err(|_panic| anyhow!("the neighbour panicked"))?
    }
}

impl Drop for Asker {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn ask(router: &Netns, addresses: &[IpAddr], stop: &AtomicBool) -> Result<()> {
    let sockets = router.run(|| {
        let (v4, v6) = (UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?, UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?);
        Ok((v4, v6))
    })?;
    while !stop.load(Ordering::Relaxed) {
        for address in addresses {
            // It may have forgotten by itself.
            router.output("ip", &["neigh", "del", &address.to_string(), "dev", EXT_LAN])?;
            let socket = if address.is_ipv4() { &sockets.0 } else { &sockets.1 };
            // Refused, or unreachable, is what became of an earlier one.
            socket.send_to(b"who has it?", (*address, DISCARD)).ok();
        }
        thread::sleep(FORGETS);
    }
    Ok(())
}
