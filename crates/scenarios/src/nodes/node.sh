# The first process of a node that is on, in network, mount, PID and UTS namespaces of its own: lays out the node's file system
# over its disk (disk.sh), then starts the container runtime, the kubelet and kube-proxy. All that it mounts ends with the mount
# namespace: directories that these programs write to are overlays on the machine's, and the machine-wide settings that a
# kubelet changes are files that already say what it wants.
#
# NODE and ADDRESS are the node's, STATE has what nodes/node.rs wrote for it, LOGS takes logs.
set -eu
hostname "$NODE"
cd /mnt
mount --bind "$STATE" state
mount --bind "$LOGS" logs
for folder in etc opt var; do
    mount -t overlay -o "lowerdir=/$folder,upperdir=/mnt/over/$folder,workdir=/mnt/work/$folder" overlay "/$folder"
done
mount -t tmpfs -o mode=755 run /run
mkdir -p /var/lib/kubelet /run/lock
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
    kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    file="settings/$(echo "${setting%=*}" | tr / .)"
    echo "${setting#*=}" > "$file"
    mount --bind "$file" "/proc/sys/${setting%=*}"
done
# One that knows the node's interfaces.
mount -t sysfs sysfs sys
mount --rbind /sys/fs/cgroup sys/fs/cgroup
mount --rbind sys /sys
mount -t bpf bpf /sys/fs/bpf
mount --make-rshared /
touch /run/booted

containerd --config state/containerd.toml >> logs/containerd.log 2>&1 &
until ctr version > /dev/null 2>&1; do sleep 0.1; done
# They stay on the disk.
if mkdir imported 2> /dev/null; then
    for image in state/images/*.tar; do ctr --namespace k8s.io images import "$image" >> logs/images.log 2>&1; done
fi
# As a service manager would, this starts it again when it ends.
while true; do
    kubelet --config "state/$NODE.kubelet.yaml" --kubeconfig "state/$NODE.kubeconfig" --hostname-override "$NODE" \
        --node-ip "$ADDRESS" >> logs/kubelet.log 2>&1 &
    echo $! > /run/kubelet.pid
    wait $! || true
    sleep 1
done &
kube-proxy --config state/kube-proxy.yaml --hostname-override "$NODE" >> logs/kube-proxy.log 2>&1 &
# The first process of a PID namespace reaps what others leave.
wait
