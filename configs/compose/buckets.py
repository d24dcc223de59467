"""Make the bucket of each region in docker-compose.yml, unless it is there."""

import sys

import boto3

for name in sys.argv[1:]:
    client = boto3.Session(profile_name=name).client("s3")
    found = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    if "snapshots" not in found:
        client.create_bucket(Bucket="snapshots")
