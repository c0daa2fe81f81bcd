//! Waiting for the node's devices.
//!
//! An agent may start before its CNI has made them: a bridge comes with the first pod that has a network of its own,
//! `ovn-k8s-mp0` with the node's part of OVN-Kubernetes. To end for that would be to start again after pauses that grow to
//! minutes. A wrong name looks the same as an early start, so whoever asks is told what is waited for, and the log has it
//! once for each device. A name that no device can have is an error.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::{FutureExt, Stream, StreamExt};
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::Settings;
use super::error::StartError;
use super::interfaces;
use super::names::Device;
use super::watch::Changes;

/// News can be lost.
const LOOK: Duration = Duration::from_secs(10);
/// The kernel's room for a name, with the zero at its end.
const NAME_SIZE: usize = 16;

/// What a start waits for, for whoever asks meanwhile.
#[derive(Clone, Debug, Default)]
pub struct Awaited(Arc<Mutex<Moment>>);

#[derive(Debug, Default)]
struct Moment {
    what: Option<String>,
    ended: Option<Instant>,
}

impl Awaited {
    /// In one line; `None` where nothing is waited for.
    pub fn what(&self) -> Option<String> {
        self.moment(|moment| moment.what.clone())
    }

    /// When the last wait was over; `None` where there was none, or is one.
    pub fn ended(&self) -> Option<Instant> {
        self.moment(|moment| moment.ended)
    }

    pub fn set(&self, what: Option<String>) {
        self.moment(|moment| {
            moment.ended = what.is_none().then(Instant::now);
            moment.what = what;
        });
    }

    fn moment<T>(&self, read: impl FnOnce(&mut Moment) -> T) -> T {
        read(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A device that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Missing {
    device: Device,
    name: String,
}

impl Missing {
    fn line(&self) -> String {
        let Self { device, name } = self;
        format!("waiting for interface {name}, the {device} ({}): there is none of that name yet", flag(*device))
    }
}

const fn flag(device: Device) -> &'static str {
    match device {
        Device::Mgmt => "--mgmt-port",
        // The overlay's device is nobody's to name.
        Device::Uplink | Device::Overlay => "--uplink",
    }
}

/// Until both devices are there.
pub(super) async fn of_devices(
    netlink: &rtnetlink::Handle,
    settings: &Settings,
    changes: &mut Changes,
    awaited: &Awaited,
) -> Result<(), StartError> {
    const NAMED: [Device; 2] = [Device::Uplink, Device::Mgmt];
    for device in NAMED {
        let name = settings.device(device);
        if !can_be_a_name(name) {
            return Err(StartError::NoSuchName { device, name: name.to_owned(), flag: flag(device) });
        }
    }
    let look = async || {
        for device in NAMED {
            let name = settings.device(device);
            if interfaces::interface(netlink, name).await?.is_none() {
                return Ok(Some(Missing { device, name: name.to_owned() }));
            }
        }
        Ok(None)
    };
    let done = until(look, changes, LOOK, awaited).await;
    done.map_err(|error| StartError::kernel("look for the node's interfaces", error))
}

/// As the kernel judges them (`dev_valid_name`).
fn can_be_a_name(name: &str) -> bool {
    let is_odd = |byte: u8| byte == b'/' || byte == b':' || byte.is_ascii_whitespace() || byte == 0x0b;
    !name.is_empty() && name.len() < NAME_SIZE && name != "." && name != ".." && !name.bytes().any(is_odd)
}

/// Looks at the beginning, with every news, and now and then without.
async fn until(
    mut look: impl AsyncFnMut() -> io::Result<Option<Missing>>,
    news: &mut (impl Stream + Unpin),
    pause: Duration,
    awaited: &Awaited,
) -> io::Result<()> {
    let mut told: Option<Missing> = None;
    let mut is_heard = true;
    loop {
        let missing = look().await?;
        if told != missing {
            match (&told, &missing) {
                (_, Some(missing)) => warn!("{}", missing.line()),
                (Some(_), None) => info!("the interfaces are there"),
                (None, None) => {}
            }
            awaited.set(missing.as_ref().map(Missing::line));
            told = missing.clone();
        }
        if missing.is_none() {
            return Ok(());
        }
        tokio::select! {
            one = news.next(), if is_heard => is_heard = one.is_some(),
            () = sleep(pause) => {}
        }
        // What has come meanwhile is one change.
        while let Some(Some(_)) = news.next().now_or_never() {}
    }
}

#[cfg(test)]
mod tests {
    use futures::channel::mpsc::unbounded;

    use super::*;

    fn missing(device: Device, name: &str) -> Option<Missing> {
        Some(Missing { device, name: name.to_owned() })
    }

    #[tokio::test]
    async fn a_start_waits_for_both_devices_and_says_for_which() {
        let awaited = Awaited::default();
        let (send, mut news) = unbounded();
        let mut said = Vec::new();
        let cni0 = || missing(Device::Mgmt, "cni0");
        let mut found = vec![None, cni0(), cni0(), missing(Device::Uplink, "br-ex")];
        let look = async || {
            said.push(awaited.what());
            send.unbounded_send(()).expect("somebody listens");
            Ok(found.pop().flatten())
        };
        // Without the news it would take an hour.
        let waited = until(look, &mut news, Duration::from_secs(3600), &awaited);
        tokio::time::timeout(Duration::from_secs(60), waited).await.expect("news are heard").expect("no error");
        let line = |it: Option<Missing>| it.as_ref().map(Missing::line);
        assert_eq!(said, [None, line(missing(Device::Uplink, "br-ex")), line(cni0()), line(cni0())]);
        let wanted = "waiting for interface cni0, the management port (--mgmt-port): there is none of that name yet";
        assert_eq!(line(cni0()).as_deref(), Some(wanted));
        assert!(awaited.what().is_none() && awaited.ended().is_some());
    }

    #[tokio::test]
    async fn where_nothing_is_missing_nothing_is_waited_for() {
        let awaited = Awaited::default();
        until(async || Ok(None), &mut futures::stream::empty::<()>(), LOOK, &awaited).await.expect("no error");
        assert_eq!((awaited.what(), awaited.ended()), (None, None));
    }

    #[tokio::test]
    async fn without_news_it_looks_now_and_then() {
        let (mut looks, began, pause) = (0, Instant::now(), Duration::from_millis(20));
        let look = async || {
            looks += 1;
            Ok(if looks < 4 { missing(Device::Mgmt, "cni0") } else { None })
        };
        let mut ended = futures::stream::empty::<()>();
        until(look, &mut ended, pause, &Awaited::default()).await.expect("no error");
        // Their end is one more reason to look.
        assert!(began.elapsed() >= pause * 2, "it must not spin where news have ended");
    }

    #[test]
    fn names_that_no_device_can_have_are_known() {
        for name in ["eth0", "ovn-k8s-mp0", "a23456789012345", "ethernet@host", "..."] {
            assert!(can_be_a_name(name), "{name:?}");
        }
        for name in ["", ".", "..", "a234567890123456", "a/b", "a:1", "a b", "a\n", "a\u{b}"] {
            assert!(!can_be_a_name(name), "{name:?}");
        }
    }
}
