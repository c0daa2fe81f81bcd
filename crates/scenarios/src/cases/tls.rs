//! Health checks by TLS, as the configuration file asks for: agents understand each other, take new certificates while they
//! run, and keep the former ones where the new cannot be used.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use super::health_port::{agent_logs, controller_logs};
use super::leader::leader;
use crate::prelude::*;

const NAME: &str = "egress-agents";

/// Writes a new CA, and a certificate of it that serves both ends.
fn certify(folder: &Path) -> Result<()> {
    let (ca_key, key) = (KeyPair::generate()?, KeyPair::generate()?);
    let mut ca = CertificateParams::new(Vec::new())?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    ca.distinguished_name.push(DnType::CommonName, "CA of the lab");
    std::fs::write(folder.join("ca"), ca.self_signed(&ca_key)?.pem())?;
    let certificate = CertificateParams::new(vec![NAME.to_owned()])?.signed_by(&key, &Issuer::new(ca, ca_key))?;
    std::fs::write(folder.join("certificate"), certificate.pem())?;
    std::fs::write(folder.join("key"), key.serialize_pem())?;
    Ok(())
}

/// Agents that serve, with certificates.
pub(super) fn start(context: &LabContext) -> Result<TestCluster> {
    let mut cluster = TestCluster::without_agents(context, vec![pod("one", "red", 1, &[])])?;
    let folder = cluster.lab.folder().join("tls");
    std::fs::create_dir(&folder)?;
    certify(&folder)?;
    let file = |name: &str| folder.join(name).display().to_string();
    let text = format!(
        "[egressip-healthcheck-tls]\nclient-cert={}\nclient-privkey={}\nclient-cacert={}\ncert-common-name={NAME}\n",
        file("certificate"),
        file("key"),
        file("ca"),
    );
    std::fs::write(folder.join("agent.conf"), text)?;
    let mut options = cluster.options(context);
    options = options.with(["--config-file".to_owned(), file("agent.conf")]);
    cluster.agents = Agent::start_all(&cluster.lab, &options)?;
    cluster.agents_serve()?;
    Ok(cluster)
}

pub(super) fn health_checks_by_tls(context: &LabContext) -> Result<()> {
    let mut cluster = start(context)?;
    let leader = leader(&cluster)?;
    let other = leader % 3 + 1;
    for number in 1..=3 {
        agent_logs(&mut cluster, number, &["answering health checks", "tls=true"], 1)?;
        cluster.assignable(number, true)?;
    }
    let serves = format!("node{other}");
    controller_logs(&mut cluster, leader, &["the node serves", &serves], 1)?;

    println!("another CA");
    let folder = cluster.lab.folder().join("tls");
    certify(&folder)?;
    for number in 1..=3 {
        agent_logs(&mut cluster, number, &["health checks were reloaded"], 1)?;
    }
    controller_logs(&mut cluster, leader, &["health checks were reloaded"], 1)?;
    // A new session. The leader notices an agent that is away for longer than the total timeout alone, and one starts sooner.
    cluster.agent(other)?.kill()?;
    controller_logs(&mut cluster, leader, &["its agent does not answer health checks", &serves], 1)?;
    cluster.agent(other)?.restart()?;
    cluster.serves(other)?;
    controller_logs(&mut cluster, leader, &["the node serves", &serves], 2)?;

    println!("a key that is none");
    // While some had reloaded the other CA and others had not, they may have refused one another.
    let refusals = |cluster: &mut TestCluster| -> Result<usize> {
        let log = std::fs::read_to_string(cluster.agent(other)?.log())?;
        Ok(log.matches("a health check is refused").count())
    };
    let before = refusals(&mut cluster)?;
    std::fs::write(folder.join("key"), "nonsense")?;
    let words = ["holds no private key", "the former files stay in use"];
    agent_logs(&mut cluster, other, &words, 1)?;
    controller_logs(&mut cluster, leader, &words, 1)?;
    let after = refusals(&mut cluster)?;
    ensure!(after == before, "the leader was refused, {} times, see the agent's log", after - before);
    Ok(())
}
