//! What is to be done inside one namespace, as data: pure builders fill it in, one executor runs it.

use anyhow::Result;

use super::netns::Netns;

/// The interface features that `ethtool` switches off.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DisabledFeatures {
    pub interface: &'static str,
    pub features: &'static [&'static str],
}

pub const CHECKSUMS: &[&str] = &["tx"];
pub const SEGMENTATION: &[&str] = &["tso", "gso", "gro"];

/// The script of one namespace.
#[derive(Debug, Clone)]
pub struct Script {
    pub netns: Netns,
    /// Before any device exists, so that devices are born with these settings.
    pub sysctls: Vec<(String, String)>,
    /// `ip` lines that make devices. All scripts' links exist before any script's `config` runs, because the other
    /// end of a veth pair lies in another namespace.
    pub links: Vec<String>,
    /// `ip` lines that configure them.
    pub config: Vec<String>,
    /// An `nft` ruleset, or nothing.
    pub rules: String,
    pub offloads: Vec<DisabledFeatures>,
}

impl Script {
    /// A namespace whose addresses are usable at once (no duplicate address detection) and that learns nothing from
    /// its neighbours (no router advertisements, no redirects).
    pub fn new(netns: Netns) -> Self {
        let mut script = Self {
            netns,
            sysctls: Vec::new(),
            links: Vec::new(),
            config: vec!["link set lo up".to_owned()],
            rules: String::new(),
            offloads: Vec::new(),
        };
        for scope in ["all", "default"] {
            script.set(format!("ipv6/conf/{scope}/accept_dad"), 0);
            script.set(format!("ipv6/conf/{scope}/accept_ra"), 0);
            script.set(format!("ipv6/conf/{scope}/accept_redirects"), 0);
            script.set(format!("ipv4/conf/{scope}/accept_redirects"), 0);
            script.set(format!("ipv4/conf/{scope}/send_redirects"), 0);
            script.set(format!("ipv4/conf/{scope}/rp_filter"), 0);
        }
        script
    }

    /// A namespace that only switches frames: it has no addresses at all.
    pub fn switch(netns: Netns) -> Self {
        let mut script = Self::new(netns);
        for scope in ["all", "default"] {
            script.set(format!("ipv6/conf/{scope}/disable_ipv6"), 1);
        }
        script
    }

    pub fn set(&mut self, path: impl Into<String>, value: u8) {
        self.sysctls.push((path.into(), value.to_string()));
    }

    pub fn forwards(&mut self) {
        self.set("ipv4/ip_forward", 1);
        self.set("ipv6/conf/all/forwarding", 1);
        self.set("ipv6/conf/default/forwarding", 1);
    }

    pub fn link(&mut self, line: impl Into<String>) {
        self.links.push(line.into());
    }

    pub fn config(&mut self, line: impl Into<String>) {
        self.config.push(line.into());
    }

    pub fn switch_off(&mut self, interface: &'static str, features: &'static [&'static str]) {
        self.offloads.push(DisabledFeatures { interface, features });
    }

    fn make_links(&self) -> Result<()> {
        self.netns.sysctl(&self.sysctls)?;
        ip(&self.netns, &self.links)
    }

    pub fn switch_off_all(&self) -> Result<()> {
        for offload in &self.offloads {
            let mut args = vec!["-K", offload.interface];
            args.extend(offload.features.iter().flat_map(|feature| [*feature, "off"]));
            self.netns.exec("ethtool", &args)?;
        }
        Ok(())
    }

    fn configure(&self) -> Result<()> {
        self.switch_off_all()?;
        ip(&self.netns, &self.config)?;
        if self.rules.is_empty() { Ok(()) } else { self.netns.feed("nft", &["-f", "-"], &self.rules) }
    }
}

/// Runs `ip` lines in one batch.
pub fn ip(netns: &Netns, lines: &[String]) -> Result<()> {
    if lines.is_empty() {
        return Ok(());
    }
    let text: Vec<String> = lines.iter().map(|line| format!("{line}\n")).collect();
    netns.feed("ip", &["-batch", "-"], &text.concat())
}

/// Runs all scripts: every link first, then every configuration.
pub fn execute(scripts: &[Script]) -> Result<()> {
    scripts.iter().try_for_each(Script::make_links)?;
    scripts.iter().try_for_each(Script::configure)
}
