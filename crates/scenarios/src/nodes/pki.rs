//! Who is who in the cluster of real nodes: one authority, the API server's certificates, and a token for each component.
//!
//! Tokens are enough for clients (`--token-auth-file`); only a kubelet knows its API server by a certificate.

use crate::prelude::*;
use std::fs;

use k8s_openapi::ByteString;
use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};

/// Users as kube-apiserver's own roles name them: (short name, user, group).
const USERS: [(&str, &str, &str); 6] = [
    ("admin", "admin", "system:masters"),
    ("controller-manager", "system:kube-controller-manager", ""),
    ("scheduler", "system:kube-scheduler", ""),
    ("proxy", "system:kube-proxy", ""),
    ("node1", "system:node:node1", "system:nodes"),
    ("node2", "system:node:node2", "system:nodes"),
];

/// Writes authority, certificates, keys, tokens, and a kubeconfig for each user.
pub(super) fn write(folder: &Path, server: IpAddr, first_service: IpAddr) -> Result<()> {
    let put = |name: &str, text: String| {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    };
    let key = KeyPair::generate()?;
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, "kubernetes");
    put("ca.crt", authority.self_signed(&key)?.pem())?;
    let issuer = Issuer::new(authority, key);

    let mut names = CertificateParams::new(vec!["kubernetes".to_owned(), "kubernetes.default.svc".to_owned()])?;
    names.subject_alt_names.extend([server, first_service].map(SanType::IpAddress));
    names.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
    let mut client = CertificateParams::new(Vec::new())?;
    client.distinguished_name.push(DnType::OrganizationName, "system:masters");
    client.distinguished_name.push(DnType::CommonName, "kube-apiserver");
    client.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth);
    for (name, params) in [("apiserver", names), ("kubelet-client", client)] {
        let key = KeyPair::generate()?;
        put(&format!("{name}.crt"), params.signed_by(&key, &issuer)?.pem())?;
        put(&format!("{name}.key"), key.serialize_pem())?;
    }

    let accounts = KeyPair::generate()?;
    put("sa.key", accounts.serialize_pem())?;
    put("sa.pub", accounts.public_key_pem())?;
    let tokens = USERS.map(|(name, user, group)| format!("token-of-{name},{user},{name},{group}\n"));
    put("tokens.csv", tokens.concat())?;
    USERS.iter().try_for_each(|(name, ..)| put(&format!("{name}.kubeconfig"), kubeconfig(folder, server, name)?))
}

/// With the authority in it: nodes have their files elsewhere.
fn kubeconfig(folder: &Path, server: IpAddr, name: &str) -> Result<String> {
    // As JSON it is in base64, as a kubeconfig wants it.
    let authority = serde_json::to_string(&ByteString(fs::read(folder.join("ca.crt"))?))?;
    Ok(format!(
        "apiVersion: v1
kind: Config
clusters:
- name: nodes
  cluster: {{server: 'https://{server}:6443', certificate-authority-data: {authority}}}
users:
- name: {name}
  user: {{token: token-of-{name}}}
contexts:
- name: nodes
  context: {{cluster: nodes, user: {name}}}
current-context: nodes
"
    ))
}
